"""How stale may the sampler be? The best ESS threshold, and the best sync period, once a sync costs something.

A budget is counted in optimiser updates; every sync takes `cost` updates' worth of it (weights travel, the engine
drains). A rule is judged by the trainer's return when the budget is spent: syncing rarely buys more updates, staler
ones. The mean field answers without noise, so it sees the bias of stale updates and not their variance; Monte Carlo
runs see both and are the check. Rules: "threshold" (sync once the raw sequence lag ESS of the batch is below it) and
"period" (sync after every k-th update; k = 1 is on-policy).
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import polars as pl

from sandbox.corrections import EssBelow, EveryK, Resync
from sandbox.errors import BadInput
from sandbox.tabular import simulate
from sandbox.tabular.problems import Problem
from sandbox.tabular.simulate import SimConfig
from sandbox.theory import levels

THRESHOLDS = (0.001, 0.003, 0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98)
PERIODS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48)
COLUMNS = ("rule", "value", "run", "step", "syncs", "return")
COSTS = (0.0, 0.5, 1.0, 2.0, 5.0)


def rules(
    thresholds: Sequence[float] = THRESHOLDS, periods: Sequence[int] = PERIODS
) -> Iterator[tuple[str, float, Resync]]:
    """Kind, value and rule of every candidate."""
    yield from (("threshold", threshold, EssBelow(threshold)) for threshold in thresholds)
    yield from (("period", float(k), EveryK(k)) for k in periods)


def mean_field_runs(
    problem: Problem,
    logits: np.ndarray,
    cfg: SimConfig,
    thresholds: Sequence[float] = THRESHOLDS,
    periods: Sequence[int] = PERIODS,
) -> pl.DataFrame:
    """Every rule's mean-field training. Columns rule, value, run (0), step, syncs (done before the step), return.

    Args:
        logits: start of trainer and sampler. (S, V)
        cfg: how to train; its own resync rule is replaced.
    """
    frames = []
    for kind, value, resync in rules(thresholds, periods):
        table = levels.mean_field(problem, logits, replace(cfg, resync=resync)).table
        before = pl.col("synced").cast(pl.Int64).cum_sum() - pl.col("synced")
        frames.append(table.select(run=pl.lit(0), syncs=before, step="step", **_named(kind, value)))
    return pl.concat(frames).select(COLUMNS)


def monte_carlo_runs(
    problem: Problem,
    logits: np.ndarray,
    cfg: SimConfig,
    runs: Sequence[int],
    thresholds: Sequence[float] = THRESHOLDS,
    periods: Sequence[int] = PERIODS,
) -> pl.DataFrame:
    """Every rule's simulated training, the same seeds under each; logits (S, V); arguments and columns as in
    `mean_field_runs`.
    """
    frames = []
    for kind, value, resync in rules(thresholds, periods):
        table = simulate.run(problem, logits, replace(cfg, resync=resync), runs).table
        before = pl.col("syncs").shift(1, fill_value=0).over("run")
        frames.append(table.select("run", "step", syncs=before, **_named(kind, value)))
    return pl.concat(frames).select(COLUMNS)


def _named(kind: str, value: float) -> dict[str, Any]:
    return {"rule": pl.lit(kind), "value": pl.lit(value), "return": "return"}


def at_budget(runs: pl.DataFrame, budget: float, costs: Sequence[float] = COSTS) -> pl.DataFrame:
    """What each rule has reached when step + cost * syncs has used the budget up.

    A sync after the last update that the budget allows is not paid for: nothing is drawn with it.

    Args:
        runs: of `mean_field_runs` or `monte_carlo_runs`, at least `budget` steps of each.
    Returns: columns cost, rule, value, return (mean over the runs), standard_error, steps, syncs (means).
    Raises BadInput: the runs are shorter than the budget.
    """
    if runs["step"].max() < budget:  # type: ignore[operator]
        raise BadInput(f"runs have {runs['step'].max()} steps, fewer than the budget of {budget:g}")
    frames = []
    for cost in costs:
        affordable = runs.filter(pl.col("step") + cost * pl.col("syncs") <= budget)
        last = affordable.group_by("rule", "value", "run", maintain_order=True).last()
        frames.append(
            last.group_by("rule", "value", maintain_order=True).agg(
                pl.lit(float(cost)).alias("cost"),
                pl.col("return").mean(),
                (pl.col("return").std() / pl.len().sqrt()).alias("standard_error"),
                pl.col("step").mean().alias("steps"),
                pl.col("syncs").mean(),
            )
        )
    return pl.concat(frames).select("cost", "rule", "value", "return", "standard_error", "steps", "syncs")


def optimum(reached: pl.DataFrame, start: float, threshold: float = 0.5) -> pl.DataFrame:
    """The best threshold and the best period at each cost, and what `threshold` loses against each.

    Args:
        reached: of `at_budget`.
        start: return before training.
    Returns: cost, best_threshold, return_best, return_at (at `threshold`), loss (of it against the best threshold,
        as a share of the best gain over `start`), flat_from and flat_to (thresholds within 1 % of the best gain),
        best_period, return_period.
    Raises BadInput: no threshold or no period in `reached`, or none of them `threshold`.
    """
    if missing := {"threshold", "period"} - set(reached["rule"] if len(reached) else []):
        raise BadInput(f"reached has no rule of the kind {min(missing)}, expected thresholds and periods")
    rows = []
    for cost in reached["cost"].unique(maintain_order=True):
        here = reached.filter(pl.col("cost") == cost)
        by_ess, by_period = (here.filter(pl.col("rule") == rule).sort("value") for rule in ("threshold", "period"))
        at = by_ess.filter(pl.col("value") == threshold)
        if at.is_empty():
            raise BadInput(f"no run has threshold {threshold:g}")
        best, period = (table.row(int(table["return"].arg_max()), named=True) for table in (by_ess, by_period))  # type: ignore[arg-type]
        gain = best["return"] - start
        flat = by_ess.filter(pl.col("return") >= best["return"] - 0.01 * abs(gain))["value"]
        rows.append(
            {
                "cost": cost,
                "best_threshold": best["value"],
                "return_best": best["return"],
                "return_at": at["return"][0],
                "loss": (best["return"] - at["return"][0]) / gain,
                "flat_from": flat.min(),
                "flat_to": flat.max(),
                "best_period": period["value"],
                "return_period": period["return"],
            }
        )
    return pl.DataFrame(rows)
