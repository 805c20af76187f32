"""The price of a sync: bookkeeping on tables typed by hand, the trade-off on a small problem, both ways of running."""

import numpy as np
import polars as pl
import pytest
from numpy.testing import assert_allclose

from sandbox.corrections import CORRECTIONS, EveryK
from sandbox.errors import BadInput
from sandbox.experiments import staleness
from sandbox.tabular import exact, problems
from sandbox.tabular.policy import log_policy
from sandbox.tabular.simulate import SimConfig
from sandbox.theory import levels


def by_hand() -> pl.DataFrame:
    """Two rules, six steps: one syncs after every step, one after every third."""
    frames = []
    for rule, value, syncs, returns in (
        ("threshold", 0.9, [0, 1, 2, 3, 4, 5], [0.2, 0.3, 0.4, 0.5, 0.6, 0.7]),
        ("threshold", 0.5, [0, 0, 0, 1, 1, 1], [0.15, 0.25, 0.35, 0.45, 0.5, 0.55]),
        ("period", 3.0, [0, 0, 0, 1, 1, 1], [0.15, 0.25, 0.35, 0.45, 0.5, 0.55]),
    ):
        columns = {"rule": rule, "value": value, "run": 0, "step": range(1, 7), "syncs": syncs, "return": returns}
        frames.append(pl.DataFrame(columns))
    return pl.concat(frames)


def test_a_budget_buys_updates_and_syncs():
    reached = staleness.at_budget(by_hand(), 6, [0.0, 1.0, 3.0])
    by_ess = reached.filter(pl.col("rule") == "threshold").sort("cost", "value")
    # cost 1: 3 updates and 2 syncs are 5, a fourth would make 7; cost 3: 2 updates and a sync are 5, a third makes 9
    assert by_ess["steps"].to_list() == [6, 6, 5, 3, 3, 2]
    assert by_ess["return"].to_list() == [0.55, 0.7, 0.5, 0.4, 0.35, 0.3]
    best = staleness.optimum(reached, start=0.1)
    assert best["best_threshold"].to_list() == [0.9, 0.5, 0.5]
    assert_allclose(best["loss"], [0.15 / 0.6, 0, 0])
    assert best["best_period"].to_list() == [3.0] * 3


def test_the_flat_part_holds_every_threshold_within_a_hundredth_of_the_gain():
    """Gain .6: thresholds that reach .694 or more are as good as the best one's .7."""
    reached = {0.1: 0.55, 0.3: 0.6939, 0.5: 0.6941, 0.7: 0.7, 0.9: 0.695, 0.95: 0.69}
    table = pl.DataFrame({"cost": 1.0, "rule": "threshold", "value": list(reached), "return": list(reached.values())})
    period = pl.DataFrame({"cost": [1.0], "rule": ["period"], "value": [3.0], "return": [0.5]})
    best = staleness.optimum(pl.concat([table, period]), start=0.1)
    assert best.select("best_threshold", "flat_from", "flat_to").row(0) == (0.7, 0.5, 0.9)


def test_refusals():
    with pytest.raises(BadInput, match="runs have 6 steps, fewer than the budget of 7"):
        staleness.at_budget(by_hand(), 7)
    with pytest.raises(BadInput, match="no rule of the kind period, expected"):
        staleness.optimum(pl.DataFrame({"rule": []}), 0.1)
    with pytest.raises(BadInput, match=r"no run has threshold 0\.7"):
        staleness.optimum(staleness.at_budget(by_hand(), 6, [0.0]), 0.1, threshold=0.7)


@pytest.fixture(scope="module")
def case():
    problem = problems.sparse_tree(np.random.default_rng(0), depth=3)
    logits = np.zeros(problem.shape)
    return problem, logits, float(exact.expectation(problem, log_policy(logits), problem.reward))


def test_the_dearer_a_sync_the_staler_the_best_sampler(case):
    problem, logits, start = case
    runs = staleness.mean_field_runs(problem, logits, SimConfig(CORRECTIONS["tis"], step_size=1.0, steps=30))
    best = staleness.optimum(staleness.at_budget(runs, 30), start)
    assert best["best_period"].is_sorted()
    assert best["best_period"][0] == 1  # free syncs: on-policy
    assert best["best_period"][-1] > 4
    assert best["best_threshold"][0] > best["best_threshold"][-1]
    assert best["return_best"].is_sorted(descending=True)
    assert (best["loss"] >= 0).all()
    on_policy = levels.mean_field(
        problem, logits, SimConfig(CORRECTIONS["tis"], step_size=1.0, steps=30, resync=EveryK(1))
    ).table
    here = runs.filter((pl.col("rule") == "period") & (pl.col("value") == 1))
    assert_allclose(here["return"], on_policy["return"])
    assert here["syncs"].to_list() == list(range(30))


def test_monte_carlo_agrees_with_the_mean_field(case):
    """12 runs of 256 responses: returns at the budget within 5 standard errors and .03 (the bias of a finite batch)."""
    problem, logits, _ = case
    some = {"thresholds": (0.2, 0.5, 0.9), "periods": (1, 4)}
    field = staleness.at_budget(
        staleness.mean_field_runs(problem, logits, SimConfig(CORRECTIONS["tis"], step_size=1.0, steps=12), **some), 12
    )
    cfg = SimConfig(CORRECTIONS["tis"], step_size=1.0, steps=12)
    drawn = staleness.at_budget(staleness.monte_carlo_runs(problem, logits, cfg, range(12), **some), 12)
    assert drawn.select("cost", "rule", "value").equals(field.select("cost", "rule", "value"))
    free = (field["cost"] == 0).to_numpy()
    gap = np.abs(drawn["return"].to_numpy() - field["return"].to_numpy())[free]
    assert np.all(gap <= 5 * drawn["standard_error"].to_numpy()[free] + 0.03)
