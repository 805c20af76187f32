"""`mismatch demo`: an ESS collapse predicted and simulated on a tabular policy, predicted and observed on a real one.

(a) A tree of 4^6 sequences: closed form, mean-field and Monte Carlo. (b) The small Qwen3, sampled by vLLM in bfloat16
and trained in float32, so that numerics and lag are both real: on-policy runs, then a stale sampler with no
correction, token TIS and DLC, all from one start. (c) One table, one figure, (d) one page.
"""

import io
import json
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import polars as pl
from matplotlib.figure import Figure

from realmodel.engine import sampler
from realmodel.engine.sampler import EngineConfig
from realmodel.policy import model as policy
from realmodel.policy import recipes, small
from realmodel.studies import compare, study
from realmodel.training.train import Learner, RunConfig, learner, train
from sandbox.corrections import CORRECTIONS, EssBelow, EveryK, Never
from sandbox.output import plots, report, run_folder
from sandbox.tabular import problems, simulate
from sandbox.tabular.simulate import SimConfig
from sandbox.theory import levels

Progress = Callable[[str, float], None]  # what is happening, and how many units of work it has just finished


@dataclass(frozen=True)
class Demo:
    """Sizes of the demo.

    Args:
        seeds: stale runs of each kind; there is one on-policy run more.
        start: on-policy updates, with warm-up, that bring the freshly built policy to the runs' common start.
        steps: optimiser updates a run.
        learning_rate: of every run.
        tabular_runs, tabular_steps: Monte Carlo runs of each correction on the tree, updates each.
    """

    seeds: int = 1
    start: int = 20
    steps: int = 50
    learning_rate: float = 1e-4
    tabular_runs: int = 20
    tabular_steps: int = 60


FULL = Demo()
FAST = Demo(start=10, steps=16, learning_rate=2e-4, tabular_runs=8, tabular_steps=30)
STALE = {"none": Never(), "tis": Never(), "dlc": EssBelow(0.5, z=1.645)}


def work(demo: Demo) -> float:
    """Units of work of `run`, about a second each: what a progress bar counts to."""
    return 75 + demo.start + demo.steps * (demo.seeds + 1 + len(STALE) * demo.seeds)


def run(demo: Demo, folder: Path, progress: Progress) -> dict[str, Any]:
    """The whole demo in a new run folder; returns what `--json` prints and leaves report.html there."""
    with run_folder.recorded(folder, {"demo": demo.__dict__}) as recorded:
        progress("tabular policy: predicting and simulating", 0)
        tabular, curves = tabular_part(demo)
        progress("small Qwen3: building it (once; then cached)", 5)
        recipe = recipes.Recipe()
        path = small.build(recipe, lambda step, steps, loss: progress(f"small Qwen3: step {step}/{steps}", 50 / steps))
        progress("vLLM: starting the engine", 0)
        base = RunConfig(learning_rate=demo.learning_rate, steps=demo.steps, engine=EngineConfig(dtype="bfloat16"))
        llm = sampler.start(path, base.engine)
        progress("vLLM: started", 20)
        runs, kl = real_part(demo, base, llm, learner(path, base), folder, progress)
        unit = {seed: value for (name, seed), value in kl.items() if name == "on-policy"}
        outcome = {"tabular": tabular, "runs": table_of(runs, kl), "kl_unit_nats": unit}
        recorded["results"] = outcome
        figure = draw(curves, runs, [row for row in tabular if "mean_field_ess_step" in row])
        built = json.loads((path / "recipe.json").read_text())
        title = "An ESS collapse: predicted, simulated, observed"
        page = report.render(title, sections(demo, outcome, figure, built), run_folder.foot())
        run_folder.write_text(folder / "report.html", page)
        pdf = io.BytesIO()
        figure.savefig(pdf, format="pdf")
        run_folder.write_bytes(folder / "figure.pdf", pdf.getvalue())
        plt.close(figure)
    return outcome | {"report": str(folder / "report.html")}


def table_of(runs: dict[tuple[str, int], pl.DataFrame], kl: dict[tuple[str, int], float]) -> list[dict[str, Any]]:
    """One row a real run, the keys of `mismatch demo --json`."""
    on_policy = {seed: compare.pass_rates(steps) for (name, seed), steps in runs.items() if name == "on-policy"}
    rows = []
    for (name, seed), steps in runs.items():
        row = {"run": plots.label(name), "seed": seed}
        if name == "on-policy":
            row |= {"final_pass_rate": float(on_policy[seed][-1].mean()), "syncs": int(steps["synced"].sum())}
        else:
            row |= compare.summary(steps, list(on_policy.values()))
        row["kl_from_on_policy"] = kl[name, seed] / kl["on-policy", max(seed, 1)] if seed else math.nan
        row["rms_discrepancy"] = float(np.sqrt(steps["discrepancy"].drop_nulls().to_numpy().mean()))
        rows.append(row)
    return rows


def tables(demo: Demo, outcome: dict[str, Any]) -> dict[str, tuple[dict[str, Any], ...]]:
    """The two tables as people read them, by title; of what `run` returns."""
    steps = ("closed_form_ess_step", "mean_field_ess_step", "simulated_ess_step")
    steps += ("simulated_earliest", "simulated_latest")
    tree = [
        row | {k: report.update_or_none(row[k], demo.tabular_steps) for k in steps if k in row}
        for row in outcome["tabular"]
    ]
    return {"tabular policy": report.aligned(tree), "real model": _real_table(outcome["runs"])}


def _real_table(rows: list[dict[str, Any]]) -> tuple[dict[str, Any], ...]:
    """A row a run; the stale runs' columns give the order."""
    table = []
    for row in rows:
        short = {"run": f"{row['run']}, seed {row['seed']}"}
        if "observed_ess_step" in row:
            short |= compare.shown(row)
        short |= {"final pass rate": row["final_pass_rate"], "syncs": row["syncs"]}
        table.append(
            short | {"KL from on-policy (units)": row["kl_from_on_policy"], "RMS of d": row["rms_discrepancy"]}
        )
    names = max(table, key=len)
    return tuple({name: row.get(name) for name in names} for row in table)


def tabular_part(demo: Demo) -> tuple[list[dict], dict[str, pl.DataFrame]]:
    """Table of the tree, one row a correction, closed form, mean-field and Monte Carlo side by side; median curves."""
    problem = problems.sparse_tree(np.random.default_rng(0))
    uniform = np.zeros(problem.shape)
    closed = levels.closed_form(problem, uniform, step_size=1.0, n=256).ess_step
    size = simulate.SimConfig(step_size=1.0, batch_size=256, steps=demo.tabular_steps)
    rows, curves = [], {}
    for name, resync in (("on-policy", EveryK(1)), ("none", Never()), ("tis", Never()), ("dlc", EssBelow(0.5))):
        correction = CORRECTIONS["none" if name == "on-policy" else name]
        config = replace(size, correction=correction, resync=resync)
        table = simulate.run(problem, uniform, config, runs=range(demo.tabular_runs)).table
        quantiles = (pl.col("ess").quantile(q).alias(key) for q, key in ((0.05, "low"), (0.5, "ess"), (0.95, "high")))
        curves[name] = table.group_by("step", maintain_order=True).agg(pl.col("return").median(), *quantiles)
        last = table.filter(pl.col("step") == demo.tabular_steps)
        row = {"run": plots.label(name), "median_return": last["return"].median(), "syncs": last["syncs"].median()}
        if name != "on-policy":
            field = levels.mean_field(
                problem, uniform, SimConfig(correction, step_size=1.0, steps=demo.tabular_steps, resync=resync)
            )
            observed = simulate.ess_steps(table)["ess_step"]
            row |= {
                # it knows the first update alone, where no correction acts: it speaks of the uncorrected run
                "closed_form_ess_step": closed if name == "none" else math.nan,
                "mean_field_ess_step": field.ess_step,
                "simulated_ess_step": observed.median(),
                "simulated_earliest": observed.min(),
                "simulated_latest": observed.max(),
            }
        rows.append(row)
    return rows, curves


def real_part(
    demo: Demo, base: RunConfig, llm: Any, pupil: Learner, folder: Path, progress: Progress
) -> tuple[dict[tuple[str, int], pl.DataFrame], dict[tuple[str, int], float]]:
    """Steps tables by (run, seed), and each run's KL from the on-policy run of seed 0 at the end, nats a response."""

    def go(name: str, config: RunConfig) -> pl.DataFrame:
        def tell(row: dict) -> None:
            progress(f"{name}: update {row['step'] + 1}/{config.steps}", 1)

        return train(config, llm, pupil, folder / name, tell)

    on_policy = replace(base, resync=EveryK(1), probe=0)
    go(study.START, study.on_policy_start(base, demo.start, base.engine))
    start = pupil.state()
    runs, weights = {}, {}
    for seed in range(demo.seeds + 1):
        pupil.restore(start)
        runs["on-policy", seed] = go(f"on-policy-{seed}", replace(on_policy, seed=seed))
        weights["on-policy", seed] = policy.snapshot(pupil.model)
    for seed in range(1, demo.seeds + 1):
        for name, resync in STALE.items():
            pupil.restore(start)
            config = replace(base, seed=seed, correction=CORRECTIONS[name], resync=resync)
            runs[name, seed] = go(f"{name}-{seed}", config)
            weights[name, seed] = policy.snapshot(pupil.model)
    reference = weights["on-policy", 0]
    responses = compare.held_out_responses(pupil, base.task, reference)
    kl = {run: compare.sequence_kl(pupil, responses, reference, to) for run, to in weights.items()}
    return runs, kl


def draw(tabular: dict[str, pl.DataFrame], runs: dict[tuple[str, int], pl.DataFrame], rows: list[dict]) -> Figure:
    """The demo's one figure: the tree above, the real model (runs of seed 1) below."""
    stale = {name: runs[name, 1] for name in STALE}
    since = {name: compare.first_probe(steps) for name, steps in stale.items()}
    fits = {name: compare.predicted_ess_step(table, len(stale[name]) - 1) for name, table in since.items()}
    figure, ((a, b, c), (d, e, f)) = plt.subplots(2, 3, figsize=(15, 8.5), layout="constrained")
    plots.ess_curves(a, {name: tabular[name] for name in STALE})
    mean_field = {name: row["mean_field_ess_step"] for name, row in zip(STALE, rows, strict=True)}
    plots.prediction_marks(a, mean_field).set_title("tree, simulated: ESS (median, 5 to 95 %)")
    plots.value_curves(b, tabular.items(), "return", "return").set_title("tree, simulated: return (median)")
    plots.variance_fit(c, since, {name: (fit.a, fit.b) for name, fit in fits.items()}, math.log(2) / 8)
    c.set_title("real model: the curve that predicts ess_step")
    margin = 1.96 * pl.col("probe_ess_se")
    ess = pl.col("probe_ess")
    bands = {name: t.with_columns(ess=ess, low=ess - margin, high=ess + margin) for name, t in stale.items()}
    plots.ess_curves(d, bands)
    plots.prediction_marks(d, {name: fit.ess_step for name, fit in fits.items()})
    d.set_title("real model: ESS on the probe (n = 1,024, 95 %)")
    lines = [(name, steps) for (name, seed), steps in runs.items() if name == "on-policy" or seed == 1]
    plots.value_curves(e, lines, "pass_probability", "held-out pass rate").set_title("real model: exact pass rate")
    plots.decomposition(f, stale).set_title("real model: discrepancy d against lag g")
    for ax in figure.axes:
        ax.legend(fontsize=8)
        ax.grid(alpha=0.25, linewidth=0.5)
    return figure


QUESTION = """
An inference engine samples, a trainer computes gradients, and the two assign different probabilities to the same
tokens: their numerics differ (discrepancy d, about constant) and the sampler's weights are stale (lag g, growing until
the next sync). The importance weights of whole responses then degenerate: their effective sample size (ESS, a fraction
of n) falls. ess_step is the number of optimiser updates since the sync until it is below 1/2. failure_step is another
event: the first drop of the pass rate more than 3 standard errors below on-policy training that lasts 5 measurements
(so one in the last four cannot count).
"""
MODEL = """
The real model is a Qwen3 of 127,424 parameters, built here by supervised training on deliberately corrupted answers
(task: sort eight digits). This is designed competence: greedy accuracy was already {greedy_accuracy:.3f} and the pass
rate at temperature 1 {pass_probability:.3f}; reinforcement learning only sharpens the sampling. vLLM samples in
bfloat16, the trainer computes in float32. All runs start from one point, {start} on-policy updates later, and take
{steps} updates of AdamW at {learning_rate:g} with 32 prompts of 8 responses. The stale runs are: uncorrected; token TIS
(truncated importance sampling: weight min(pi/q, 2) a token), neither ever synced; and DLC (discrepancy-lag correction,
our reading of an abstract: weight min(pi/mu, 2) a token, centred score), which syncs when the lower 95 % limit of its
batch's sequence lag ESS (n = 256) is below 1/2. Runs of one seed share their prompts and, until one syncs, their draws.
"""
FIGURE = """
Triangles: predicted ess_step. On the tree the prediction is mean-field (the expected update, iterated); on the real
model a k\u00b2 + b k is fitted to the variance of the sequence log lag ratio over the first updates only (at most
ln2/8) and extrapolated to ln 2. The ESS of the real model is measured on a probe of 1,024 responses, drawn afresh at
each sync and not used for training. Ticks above an ESS curve: syncs.
"""
TREE = """
A tree of 4^6 sequences, reward 1 for a random best tenth, step size 1, 256 responses an update, {tabular_runs} runs of
{tabular_steps} updates: medians, and the range from the smallest to the largest. The closed form uses the first update
alone and speaks of the uncorrected run. Here DLC syncs when the ESS of a batch itself is below 1/2.
"""
OBSERVED = """
Pass rates are exact: the probability of the one right answer, averaged over 512 held-out problems. "Below on-policy"
has its standard error in the next column. It counts the held-out problems and the noise of seeds, pooled over the
on-policy runs; with two of them it is a rough figure. "Earliest" and "latest" are where the pointwise 95 % limits of
the ESS cross 1/2; a sync ends the watch. The KL from on-policy is that of 1,024 whole responses of the on-policy run of
seed 0. Its unit is the KL between that run and the on-policy run of the same seed as the row. RMS of d is in nats. A
dash: not applicable.
"""
FAST_NOTE = """
This is the fast demo: twice the learning rate of the full one, so that an ESS collapses within {steps} updates. At that
rate a batch of 256 sees the heaviest responses too late, and DLC's rule lets the ESS pass 1/2 (see LOG.md).
"""


def sections(demo: Demo, outcome: dict[str, Any], figure: Figure, recipe: dict[str, Any]) -> list[report.Section]:
    """The page's text, tables and figure."""
    values = demo.__dict__ | recipe
    note = (FAST_NOTE.format(**values),) if demo.learning_rate == FAST.learning_rate else ()
    tree, runs = tables(demo, outcome).values()
    return [
        report.Section("What was run", (QUESTION, MODEL.format(**values), *note)),
        report.Section("One figure", (FIGURE,), figure=plots.svg(figure)),
        report.Section("Tabular policy: predicted and simulated", (TREE.format(**values),), rows=tree),
        report.Section("Real model: predicted and observed", (OBSERVED,), rows=runs),
    ]
