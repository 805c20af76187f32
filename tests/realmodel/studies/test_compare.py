"""ess_step and failure_step on curves whose answer is known by construction."""

import math

import numpy as np
import polars as pl
import pytest

from realmodel.studies import compare
from sandbox.errors import BadInput


def since_sync(ess: list[float], se: float = 0.0) -> pl.DataFrame:
    k = list(range(len(ess)))
    return pl.DataFrame({"k": k, "ess": ess, "ess_se": [se] * len(ess), "var_log_ratio": [0.004 * x * x for x in k]})


def test_observed_ess_step_with_its_interval():
    crossing = compare.observed_ess_step(since_sync([1.0, 0.9, 0.62, 0.49, 0.38, 0.51, 0.2], se=0.07))
    # .62 - 1.96 * .07 = .483 < 1/2; .38 + .137 = .517; .2 + .137 < 1/2
    assert (crossing.step, crossing.low, crossing.high, crossing.measured) == (3.0, 2.0, 6.0, 6)
    never = compare.observed_ess_step(since_sync([1.0, 0.9, 0.8]))
    assert math.isinf(never.step)
    assert never.measured == 2


def test_predicted_ess_step_extrapolates_the_first_steps():
    fit = compare.predicted_ess_step(since_sync([1.0] * 40), horizon=50)
    assert fit.ess_step == math.ceil(math.sqrt(math.log(2) / 0.004))
    assert compare.predicted_ess_step(since_sync([1.0] * 40), horizon=10).status == "no_collapse_within_horizon"
    assert compare.predicted_ess_step(since_sync([1.0] * 3), horizon=50).status == "not_identifiable"


def curves(*means: list[float]) -> list[np.ndarray]:
    """Pass rates (steps, 400 problems) around the given means, the same problems easy or hard in each run."""
    easy = np.random.default_rng(0).normal(scale=0.1, size=400)
    return [np.array(mean)[:, None] + easy for mean in means]


def test_failure_step_is_a_lasting_drop_beyond_the_noise_of_seeds():
    up, down = [0.5 + 0.01 * k + 0.002 for k in range(12)], [0.5 + 0.01 * k - 0.002 for k in range(12)]
    on_policy = curves(up, down)
    # one-run seed variance .004^2/2; for a run against the mean of two, 3 se = 3 sqrt(8e-6 * 1.5) = .0104
    middle = [0.5 + 0.01 * k for k in range(12)]
    small = [m - 0.0100 for m in middle]
    assert math.isinf(compare.failure_step(curves(small)[0], on_policy))
    large = [m - (0.0110 if k >= 4 else 0.0) for k, m in enumerate(middle)]
    assert compare.failure_step(curves(large)[0], on_policy) == 4.0
    passing = [m - (0.2 if 3 <= k < 7 else 0.0) for k, m in enumerate(middle)]
    assert math.isinf(compare.failure_step(curves(passing)[0], on_policy))
    better = [m + 0.2 for m in middle]
    assert math.isinf(compare.failure_step(curves(better)[0], on_policy))
    difference, error = compare.shortfall(curves(large)[0], on_policy)
    assert difference[5] == pytest.approx(0.0110)
    assert error[5] == pytest.approx(math.sqrt(8e-6 * 1.5))


def test_one_on_policy_run_has_no_seed_noise():
    with pytest.raises(BadInput, match="on_policy has 1 run"):
        compare.shortfall(*(lambda x: (x, [x]))(curves([0.5, 0.6])[0]))


def test_longest_run():
    assert compare.longest_run(np.array([False, True, True, False, True])) == 2
    assert compare.longest_run(np.array([False])) == 0


def test_a_run_without_a_probe():
    with pytest.raises(BadInput, match="no probe_ess"):
        compare.first_probe(pl.DataFrame({"step": [0]}))


def test_a_variance_that_comes_back_is_no_early_measurement():
    """After the rise past ln2/8 at k = 5, low values at 8 and 9 would otherwise be fitted and double the prediction."""
    table = since_sync([1.0] * 10)
    back = table.with_columns(var_log_ratio=pl.when(pl.col("k") >= 8).then(0.01).otherwise(pl.col("var_log_ratio")))
    fit = compare.predicted_ess_step(back, horizon=50)
    assert fit.points_used == 4
    assert fit.ess_step == compare.predicted_ess_step(table, horizon=50).ess_step
