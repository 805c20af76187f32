"""`mismatch predict`: when does the sequence ESS collapse, by the three levels of THEORY section 6, with the curve.

On a tabular problem: closed form, linearised with the update really applied, exact mean field, and beside them what
simulated runs do (ess_step and failure_step, never one word for both). On the steps of a real run: the fit to its own
first measurements, scored out of sample. inf is "no collapse within the horizon", nan "not identifiable" or "no such
level": a correction that weighs whole truncated sequences has no recursion, and simulation is its only answer.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import polars as pl

from sandbox.corrections import CORRECTIONS, Correction, EveryK
from sandbox.errors import BadInput, positive
from sandbox.output import problem_json, report
from sandbox.tabular import exact, simulate
from sandbox.tabular.policy import GivenOffset
from sandbox.tabular.problems import Case, Problem
from sandbox.tabular.simulate import SimConfig
from sandbox.theory import collapse, levels

Start = Literal["sampler_logits", "uniform"]
LEVELS = ("closed_form", "linearised", "mean_field", "simulated")


@dataclass(frozen=True)
class PredictConfig:
    """A tabular prediction: training from a sync, never synced again.

    Args:
        problem: a preset or a PROBLEM.json file (`problem_json.py`).
        start: weights at the sync, the problem's own ("sampler_logits") or 0 ("uniform").
        exact_sampler: leave the problem's `sampler_log_offset` out.
        correction: any member of `corrections.CORRECTIONS`.
        step_size: of plain gradient ascent on the logits.
        batch_size: responses per update.
        advantage: "centred" or "normalised".
        steps: the horizon; a later collapse is "no collapse".
        threshold: sequence ESS below which it has collapsed.
        runs: simulated runs, of this training and of on-policy training; 0 leaves simulation and failure_step out.
        seed: of the simulated runs.
    """

    problem: str
    start: Start = "sampler_logits"
    exact_sampler: bool = False
    correction: Correction = CORRECTIONS["none"]
    step_size: float = 1.0
    batch_size: int = 256
    advantage: exact.Advantage = "normalised"
    steps: int = 100
    threshold: float = 0.5
    runs: int = 8
    seed: int = 0

    def __post_init__(self) -> None:
        collapse.var_threshold(self.threshold)
        positive("step_size", self.step_size)
        if self.runs == 1 or self.runs < 0:
            raise BadInput(f"runs is {self.runs}, expected 0 or at least 2: the noise of seeds needs two")
        training(self, 0.0)  # refuses the rest


def start_of(case: Case, start: Start) -> np.ndarray:
    """Weights of trainer and sampler at the sync. (S, V)"""
    return case.sampler_logits if start == "sampler_logits" else np.zeros(case.problem.shape)


def training(config: PredictConfig, log_offset: np.ndarray | float) -> SimConfig:
    """The simulated training of this prediction, under that offset of the sampler's engine, nats. (S, V) or a number"""
    return SimConfig(
        config.correction,
        discrepancy=GivenOffset(log_offset),
        step_size=config.step_size,
        batch_size=config.batch_size,
        steps=config.steps,
        advantage=config.advantage,
        seed=config.seed,
    )


def tabular(config: PredictConfig) -> dict[str, Any]:
    """ess_step by every level, failure_step, and the curves.

    Returns: `ess_step` {closed_form, linearised, mean_field, simulated: median, simulated_interval: quartiles},
        `failure_step` {simulated: median, share: of the runs that failed within the horizon}, `prediction` (that of the
        mean field, or of simulation where there is none), `status`, `a`, `b`, `horizon`, `curve` (k, and Var[log w] of
        each level, and the mean field's ess and return). The closed form is that of the uncorrected update under an
        exact sampler, whatever the correction and the discrepancy; the others have both.
    """
    case = problem_json.named(config.problem)
    problem, logits, rng = case.problem, start_of(case, config.start), np.random.default_rng(config.seed)
    offset = 0.0 if config.exact_sampler or not case.sampler_log_offset.any() else case.sampler_log_offset
    how = config.advantage, config.threshold
    closed = levels.closed_form(problem, logits, config.step_size, config.batch_size, *how, rng=rng)
    k = np.arange(1, config.steps + 1)
    curve = {"k": k, "closed_form": closed.a * k**2 + closed.b * k}
    steps = {"closed_form": closed.ess_step if closed.ess_step <= config.steps else math.inf}
    steps |= {"linearised": math.nan, "mean_field": math.nan}
    recursion = config.correction.factors or config.correction == CORRECTIONS["seq_is"]
    if recursion:
        cfg = training(config, offset)
        curve["linearised"], steps["linearised"] = levels.linearised(problem, logits, cfg, closed.b, config.threshold)
        field = levels.mean_field(problem, logits, cfg, config.threshold)
        steps["mean_field"] = field.ess_step
        curve |= {"mean_field": field.table["var_log_ratio"], **{c: field.table[c] for c in ("ess", "return")}}
    outcome = {"ess_step": steps, "a": closed.a, "b": closed.b, "threshold": config.threshold, "horizon": config.steps}
    if config.runs:
        simulated, failure = _simulated(problem, logits, config, offset)
        outcome |= {"ess_step": steps | simulated, "failure_step": failure}
    best = steps["mean_field"] if recursion else outcome["ess_step"].get("simulated", math.nan)
    status = "predicted" if math.isfinite(best) else "no_collapse_within_horizon" if best > 0 else "not_identifiable"
    outcome |= {"prediction": best, "status": status}
    return outcome | {"curve": pl.DataFrame(curve).to_dicts()}


def _simulated(
    problem: Problem, logits: np.ndarray, config: PredictConfig, offset: np.ndarray | float
) -> tuple[dict[str, Any], dict[str, Any]]:
    """ess_step of simulated runs, and their failure_step against as many on-policy ones with other seeds."""
    runs = range(config.runs)
    table = simulate.run(problem, logits, training(config, offset), runs).table
    fresh = replace(training(config, 0.0), correction=CORRECTIONS["none"], resync=EveryK(1))
    on_policy = simulate.run(problem, logits, fresh, range(config.runs, 2 * config.runs)).table
    steps = np.sort(simulate.ess_steps(table, config.threshold)["ess_step"].to_numpy())
    quartiles = [float(steps[int(share * (len(steps) - 1))]) for share in (0.25, 0.75)]
    # the first measurement is that after the first update
    fails = 1 + collapse.failure_steps(*(x["return"].to_numpy().reshape(config.runs, -1) for x in (table, on_policy)))
    failure = {"simulated": _median(np.sort(fails)), "share": float(np.isfinite(fails).mean())}
    return {"simulated": _median(steps), "simulated_interval": quartiles}, failure


def _median(ordered: np.ndarray) -> float:
    """The upper median, so that inf counts as a number of updates like any other."""
    return float(ordered[len(ordered) // 2])


def measured(since_sync: pl.DataFrame, threshold: float, horizon: int) -> dict[str, Any]:
    """The fit to a run's own curve: quadratic and with curvature, each scored against what was then observed.

    Args:
        since_sync: columns k (updates since the sync), ess, var_log_ratio.
        horizon: updates; a later collapse is not predicted.
    Returns: `predicted_ess_step`, `interval`, `status`, `points_used`, `a`, `b`, the same with gamma in `curved`,
        `observed_ess_step`, `out_of_sample` (whether the collapse came at twice the last step fitted or later),
        `relative_error`, `horizon`, `curve`.
    """
    later = since_sync.filter(pl.col("k") > 0)
    k, var = later["k"].to_numpy(), later["var_log_ratio"].to_numpy()
    fit, curved = (collapse.fit_collapse(k, var, threshold, horizon, curvature) for curvature in (False, True))
    below = later.filter(pl.col("ess") < threshold)["k"]
    observed = float(below[0]) if len(below) else math.inf
    used = k[(var > 0) & (var <= collapse.var_threshold(threshold) * collapse.FIT_SHARE)]
    both_finite = math.isfinite(fit.ess_step) and math.isfinite(observed)
    curve = later.select("k", "ess", "var_log_ratio").with_columns(
        fit=pl.Series(fit.curve(k)), curved=pl.Series(curved.curve(k))
    )
    return {
        "predicted_ess_step": fit.ess_step,
        "interval": fit.interval,
        "status": fit.status,
        "points_used": fit.points_used,
        "a": fit.a,
        "b": fit.b,
        "curved": {
            "predicted_ess_step": curved.ess_step,
            "interval": curved.interval,
            "status": curved.status,
            "gamma": curved.gamma,
        },
        "observed_ess_step": observed,
        "out_of_sample": bool(len(used) and observed >= 2 * used.max()),
        "relative_error": abs(fit.ess_step / observed - 1) if both_finite else math.nan,
        "threshold": threshold,
        "horizon": horizon,
        "curve": curve.to_dicts(),
    }


def tables(outcome: dict[str, Any]) -> dict[str, Sequence[dict[str, Any]]]:
    """What `mismatch predict` prints for people, of `tabular` or `measured`."""

    def step(value: float) -> Any:
        return report.update_or_none(value, outcome["horizon"])

    if "observed_ess_step" in outcome:
        watched = max((row["k"] for row in outcome["curve"]), default=0)  # a sync ends the watch
        low, high = outcome["interval"]
        row = {"predicted ess_step": step(outcome["predicted_ess_step"]), "earliest": step(low), "latest": step(high)}
        row |= {"with curvature": step(outcome["curved"]["predicted_ess_step"]), "status": outcome["status"]}
        row |= {"updates fitted": outcome["points_used"]}
        row |= {"observed ess_step": report.update_or_none(outcome["observed_ess_step"], watched)}
        row |= {"failure_step": step(outcome["failure_step"])}
        return {"collapse of this run, updates since the sync": [row]}
    found = outcome["ess_step"]
    rows = [{"level": level, "ess_step": step(found[level])} for level in LEVELS if level in found]
    failure = outcome.get("failure_step", {"simulated": math.nan})["simulated"]
    summary = {"prediction": step(outcome["prediction"]), "status": outcome["status"], "failure_step": step(failure)}
    which = "ess_step, updates since the sync (closed_form: always uncorrected and without discrepancy)"
    return {which: rows, "prediction": [summary]}
