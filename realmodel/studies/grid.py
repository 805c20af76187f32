"""`mismatch compare GRID.toml`: predicted against observed ess_step over learning rates, dtypes, corrections and seeds.

Every stale run is predicted out of sample, from its own first updates (THEORY section 6), in three ways: the quadratic
fit, the fit with curvature, a tabular twin (a tree whose drift and noise are the fitted ones, trained in the mean field
under the run's correction, so that its loop is closed). Two more need other runs: the path, where on-policy training at
that rate leaves the common start behind (what exact importance weighting would follow, section 5), and a constant, the
median of the other runs. failure_step stands beside ess_step, never for it.
"""

import math
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
from matplotlib.figure import Figure
from rich.progress import Progress

from realmodel.studies import compare, study
from realmodel.training.settings import RunConfig
from sandbox.corrections import CORRECTIONS, Correction, EveryK, Never
from sandbox.errors import BadInput
from sandbox.output import config, plots, report, run_folder
from sandbox.tabular import problems
from sandbox.tabular.exact import name_of
from sandbox.tabular.simulate import SimConfig
from sandbox.theory import collapse, levels

WAYS = ("quadratic", "curved", "twin", "path", "constant")


@dataclass(frozen=True)
class Grid:
    """Real-model runs on a grid, each never synced, beside on-policy ones.

    Args:
        learning_rates: one row of the grid each.
        steps: updates of the runs at each learning rate.
        dtypes: of the engine; on-policy runs use the first.
        corrections: "none" (the uncorrected runs that the prediction is judged on) and others.
        seeds: of each cell.
        on_policy: on-policy runs of each learning rate, >= 2.
        start: on-policy updates before every run.
        threshold: sequence ESS below which it has collapsed.
        base: all other settings of the runs.
    """

    learning_rates: tuple[float, ...] = (5e-5, 1e-4, 2e-4, 4e-4)
    steps: tuple[int, ...] = (80, 50, 30, 16)
    dtypes: tuple[str, ...] = ("float32", "bfloat16")
    corrections: tuple[Correction, ...] = (CORRECTIONS["none"], CORRECTIONS["tis"])
    seeds: int = 3
    on_policy: int = 2
    start: int = 20
    threshold: float = 0.5
    base: RunConfig = field(default_factory=lambda: RunConfig(held_out=256, checkpoint_every=10))

    def __post_init__(self) -> None:
        collapse.var_threshold(self.threshold)
        if len(self.steps) != len(self.learning_rates):
            raise BadInput(f"steps has {len(self.steps)} numbers for {len(self.learning_rates)} learning_rates")
        for name, least in (("seeds", 1), ("on_policy", 2), ("start", 1)):
            if getattr(self, name) < least:
                raise BadInput(f"{name} is {getattr(self, name)}, expected at least {least}")
        for name in ("learning_rates", "dtypes", "corrections"):
            if not getattr(self, name):
                raise BadInput(f"{name} is empty, expected at least one")
        planned(self)  # refuses what RunConfig would


@dataclass(frozen=True)
class Planned:
    """One run of a grid; `correction` "on-policy" for those that the others are held against."""

    name: str
    correction: str
    dtype: str
    config: RunConfig


def planned(grid: Grid) -> list[Planned]:
    """Every run, those of one seed together, so that an unfinished grid is a smaller grid."""
    runs = []
    for seed in range(1, max(grid.seeds, grid.on_policy) + 1):
        for rate, steps in zip(grid.learning_rates, grid.steps, strict=True):
            base = replace(grid.base, learning_rate=rate, steps=steps, seed=seed)
            where = f"lr-{rate:g}"
            if seed <= grid.on_policy:
                engine = replace(base.engine, dtype=grid.dtypes[0])
                fresh = replace(base, correction=CORRECTIONS["none"], resync=EveryK(1), probe_kept=True, engine=engine)
                runs.append(Planned(f"{where}/on-policy-{seed}", "on-policy", grid.dtypes[0], fresh))
            for dtype in grid.dtypes if seed <= grid.seeds else ():
                for correction in grid.corrections:
                    engine = replace(base.engine, dtype=dtype)
                    stale = replace(base, correction=correction, resync=Never(), engine=engine)
                    name = name_of(correction)
                    runs.append(Planned(f"{where}/{dtype}/{name}-{seed}", name, dtype, stale))
    return runs


def carry_out(grid: Grid, folder: Path, progress: study.Progress) -> None:
    """The runs that `folder` lacks."""
    first = replace(grid.base.engine, dtype=grid.dtypes[0])
    rate = sorted(grid.learning_rates)[len(grid.learning_rates) // 2]
    start = study.on_policy_start(replace(grid.base, learning_rate=rate), grid.start, first)
    study.carry_out(start, {run.name: run.config for run in planned(grid)}, folder, progress)


def rows(grid: Grid, folder: Path) -> pl.DataFrame:
    """One row a finished stale run: where it stands in the grid, predicted by each of WAYS, observed, failure_step.

    Raises BadInput where no stale run is finished.
    """
    runs = planned(grid)
    tables = study.steps_of(folder, [run.name for run in runs])
    references: dict[float, list[np.ndarray]] = {}
    paths: dict[float, list[float]] = {}
    for run in runs:
        if run.correction == "on-policy" and run.name in tables:
            references.setdefault(run.config.learning_rate, []).append(compare.pass_rates(tables[run.name]))
            observed = compare.observed_ess_step(compare.first_probe(tables[run.name]), grid.threshold)
            paths.setdefault(run.config.learning_rate, []).append(observed.step)
    found = []
    for run in runs:
        rate, against = run.config.learning_rate, references.get(run.config.learning_rate, [])
        if run.correction == "on-policy" or run.name not in tables or len(against) < 2:
            continue
        steps, horizon = tables[run.name], run.config.steps
        told = compare.summary(steps, against, grid.threshold)
        since = compare.first_probe(steps)
        curved = compare.predicted_ess_step(since, horizon, grid.threshold, curvature=True)
        fit = compare.predicted_ess_step(since, horizon, grid.threshold)
        found.append(
            {
                "run": run.name,
                "learning_rate": rate,
                "dtype": run.dtype,
                "correction": run.correction,
                "seed": run.config.seed,
                "updates": horizon,
                "observed": told["observed_ess_step"],
                "observed_low": told["observed_interval"][0],
                "observed_high": told["observed_interval"][1],
                "failure_step": told["failure_step"],
                "a": fit.a,
                "b": fit.b,
                "quadratic": fit.ess_step,
                "curved": curved.ess_step,
                "path": float(np.median(paths[rate])),
                "twin": twin(fit, run.config.correction, horizon, grid.threshold),
                "points_fitted": fit.points_used,
                "out_of_sample": bool(told["out_of_sample"]),
                "final_pass_rate": told["final_pass_rate"],
                "token_kl_at_ess_step": told["token_kl_at_ess_step"],
            }
        )
    if not found:
        raise BadInput(f"{folder} holds no finished stale run with two on-policy ones beside it")
    table = pl.DataFrame(found)
    return table.with_columns(constant=pl.Series(_constant(table)))


def curves(grid: Grid, folder: Path) -> pl.DataFrame:
    """What was measured of every finished stale run until its end: run, k, ess, ess_se, var_log_ratio, token_kl."""
    names = [run.name for run in planned(grid) if run.correction != "on-policy"]
    tables = study.steps_of(folder, names)
    return pl.concat(
        [compare.first_probe(steps).select(pl.lit(name).alias("run"), pl.all()) for name, steps in tables.items()]
    )


def twin(fit: collapse.Fit, correction: Correction, horizon: int, threshold: float = 0.5) -> float:
    """ess_step of the tabular twin: the depth-6 tree at the step size whose drift term is the fitted a, its mean field
    under the correction, the fitted noise b k added. inf: not within the horizon; nan where the fit says nothing.
    """
    if not math.isfinite(fit.a) or fit.a + fit.b <= 0:
        return math.nan
    tree = problems.sparse_tree(np.random.default_rng(0))
    start = np.zeros(tree.shape)
    unit = levels.closed_form(tree, start, 1.0, 1).a
    step_size = math.sqrt(fit.a / unit)
    k = np.arange(1, horizon + 1)
    var = fit.b * k
    if step_size > 0:
        field = levels.mean_field(tree, start, SimConfig(correction, step_size=step_size, steps=horizon))
        var = var - np.log(field.table["ess"].to_numpy())
    above = k[var >= collapse.var_threshold(threshold)]
    return float(above[0]) if len(above) else math.inf


def _constant(table: pl.DataFrame) -> list[float]:
    """Median observed ess_step of the other uncorrected runs that collapsed; nan where there is none."""
    known = table.filter((pl.col("correction") == "none") & pl.col("observed").is_finite())
    others = [known.filter(pl.col("run") != run)["observed"].median() for run in table["run"]]
    return [math.nan if x is None else float(x) for x in others]  # type: ignore[arg-type]


def scores(table: pl.DataFrame) -> list[dict[str, Any]]:
    """One row a way of predicting.

    median_relative_error: of the uncorrected runs whose observed ess_step is at least twice the points fitted and that
        both numbers exist for (n_error); a predicted "none" of a run that collapsed counts as an error of inf.
    right_calls: share of the corrected runs (n_calls) whose collapse, or none, within the horizon was called.
    """
    judged = table.filter((pl.col("correction") == "none") & pl.col("out_of_sample") & pl.col("observed").is_finite())
    corrected = table.filter(pl.col("correction") != "none")
    told = []
    for way in WAYS:
        known = judged.filter(pl.col(way).is_not_nan())
        error = (known[way] / known["observed"] - 1).abs()
        calls = corrected.filter(pl.col(way).is_not_nan())
        called, came = ((calls[name] <= calls["updates"]) for name in (way, "observed"))
        told.append(
            {
                "way": way,
                "median_relative_error": float(error.median()) if len(error) else math.nan,  # type: ignore[arg-type]
                "worst_relative_error": float(error.max()) if len(error) else math.nan,  # type: ignore[arg-type]
                "n_error": len(error),
                "right_calls": float((called == came).mean()) if len(calls) else math.nan,  # type: ignore[arg-type]
                "n_calls": len(calls),
            }
        )
    return told


def figure(table: pl.DataFrame) -> Figure:
    """Fits of the real runs and their tabular twins against what was observed, in one plot."""
    drawn = Figure(figsize=(7, 5.6), layout="constrained")
    parts = [
        table.select("correction", "observed", pl.col(way).alias("predicted"), pl.lit(where).alias("where"))
        for way, where in (("quadratic", "fit"), ("twin", "tabular twin"))
    ]
    both = pl.concat(parts).filter(pl.col("predicted").is_not_nan())
    plots.predicted_against_observed(drawn.subplots(), both, float(table["updates"].max()))  # type: ignore[arg-type]
    return drawn


def outcome(table: pl.DataFrame) -> dict[str, Any]:
    """What `mismatch compare --json` prints."""
    uncorrected = table.filter(pl.col("correction") == "none")
    first = (uncorrected["failure_step"] < uncorrected["observed"]).mean()
    return {"scores": scores(table), "failure_before_ess_uncorrected": first, "runs": table.to_dicts()}


def save(table: pl.DataFrame, measured: pl.DataFrame, folder: Path) -> None:
    """compare.parquet, curves.parquet, figure.pdf and report.html into the grid's folder."""
    run_folder.write_table(folder / "compare.parquet", table)
    run_folder.write_table(folder / "curves.parquet", measured)
    drawn = figure(table)
    sections = [
        report.Section(
            "How well each way predicts",
            ("Errors are out of sample, over uncorrected runs; calls are of collapse or none, over corrected runs.",),
            tuple(scores(table)),
            plots.svg(drawn),
        ),
        report.Section("Runs", rows=report.aligned(table.to_dicts())),
    ]
    run_folder.write_text(
        folder / "report.html", report.render("ess_step, predicted and observed", sections, run_folder.foot())
    )
    drawn.savefig(folder / "figure.pdf")


def run(source: Path, folder: Path, resume: bool, bar: Progress) -> compare.Told:
    """Make the runs of a grid that its folder lacks, and compare."""
    asked = config.load(source, Grid)
    run_folder.begin_run(folder, config.resolved(asked), resume)
    total = asked.start + sum(run.config.steps for run in planned(asked))
    task = bar.add_task("starting", total=total)
    carry_out(asked, folder, lambda what, done: bar.update(task, description=what, advance=done))
    table = rows(asked, folder)
    save(table, curves(asked, folder), folder)
    run_folder.finish_run(folder)
    told = outcome(table) | {"folder": str(folder)}
    steps = (*WAYS, "observed", "failure_step")
    shown = [
        {"run": row["run"]}
        | {name: report.update_or_none(row[name], row["updates"]) for name in steps}
        | {"final_pass_rate": row["final_pass_rate"]}
        for row in table.to_dicts()
    ]
    return told, {"ess_step, updates since the sync": shown, "how well each way predicts": scores(table)}
