"""The four parts: each against enumeration of its formula, their sums against finite differences of exact updates."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from numpy.testing import assert_allclose

from sandbox.corrections import CORRECTIONS
from sandbox.errors import BadInput
from sandbox.tabular import bias, exact, problems
from sandbox.tabular.policy import log_policy, policies
from sandbox.tabular.problems import Problem
from tests.support import reference, strategies
from tests.support.strategies import random_logits

STEP = 1e-4


def examples() -> list[tuple[Problem, np.ndarray, np.ndarray]]:
    """Problem, mu, log ratio: a machine whose states repeat, one that can end early, a tree."""
    rng = np.random.default_rng(0)
    ending = Problem([[1, -1, 0], [2, 0, 1], [-1, 2, 2]], rng.normal(1, 1, (3, 3)), 7)
    chosen = [problems.state_machine(rng, 4, 3, 12), ending, problems.tree(3, 3, rng.normal(1, 1, 27))]
    return [(p, log_policy(random_logits(rng, p)), rng.normal(0.3, 1, p.shape)) for p in chosen]


@given(strategies.problems_with_policies())
def test_each_part_equals_enumeration(case):
    problem, (pi, mu, q) = case
    for log_ratio in (mu - q, pi - mu):
        parts = bias.split(problem, mu, log_ratio)
        for name, expected in reference.bias_split(problem, mu, log_ratio).items():
            assert_allclose(getattr(parts, name), expected, rtol=1e-10, atol=1e-12, err_msg=name)
        assert_allclose(parts.total, sum(parts), rtol=0, atol=1e-15)


def central(f, log_ratio) -> np.ndarray:
    """Derivative of f(e log_ratio) at e = 0, fourth order."""
    near, far = (f(h * log_ratio) - f(-h * log_ratio) for h in (STEP, 2 * STEP))
    return (8 * near - far) / (12 * STEP)


@pytest.mark.parametrize("example", range(3))
@pytest.mark.parametrize("name", exact.EXACT_CORRECTIONS)
def test_a_correction_leaves_the_named_parts_of_a_small_discrepancy(name, example):
    """Bias of the exact update at zero lag, as the size of d goes to 0: the sum of the parts that are left."""
    problem, mu, d = examples()[example]
    update = central(lambda x: exact.expected_update(problem, policies(mu, mu, -x), CORRECTIONS[name]), d)
    parts = bias.split(problem, mu, d)
    left = parts.left(bias.DISCREPANCY_LEFT[name])
    assert_allclose(update, left, rtol=0, atol=1e-6 * np.abs(parts.total).max())
    assert np.linalg.norm(parts.leading) > 0.01 * np.linalg.norm(parts.total)
    assert (name == "seq_is") == np.all(left == 0)


@pytest.mark.parametrize("example", range(3))
@pytest.mark.parametrize("name", exact.EXACT_CORRECTIONS)
def test_a_correction_leaves_the_named_parts_of_a_small_lag(name, example):
    problem, mu, lag = examples()[example]

    def off(x: np.ndarray) -> np.ndarray:
        three = policies(mu + x, mu)
        return exact.expected_update(problem, three, CORRECTIONS[name]) - exact.gradient(problem, three.train)

    parts = bias.split(problem, mu, lag)
    left = parts.left(bias.LAG_LEFT[name])
    assert_allclose(central(off, lag), left, rtol=0, atol=1e-6 * np.abs(parts.total).max())


@pytest.mark.parametrize("name", ["ppo", "seq_tis", "seq_mis", "seq_dlc"])
def test_what_is_left_where_there_is_no_recursion_by_enumeration(name):
    rng = np.random.default_rng(1)
    problem = problems.state_machine(rng, 2, 2, 4)
    mu, x = log_policy(random_logits(rng, problem)), rng.normal(0.3, 1, problem.shape)
    parts = bias.split(problem, mu, x)

    def discrepancy(d: np.ndarray) -> np.ndarray:
        return reference.expected_update(problem, mu, mu, policies(mu, mu, -d).rollout, name)

    def lag(g: np.ndarray) -> np.ndarray:
        pi = log_policy(mu + g)
        return reference.expected_update(problem, pi, mu, mu, name) - exact.gradient(problem, pi)

    def weights_as(which: str):
        """PPO weighs tokens and does not clip here; a truncated sequence weight does not truncate here."""
        return {"ppo": "tis", "seq_mis": "seq_tis"}.get(which, which)

    assert bias.DISCREPANCY_LEFT[name] == bias.DISCREPANCY_LEFT[{"seq_dlc": "dlc"}.get(name, weights_as(name))]
    for f, left in ((discrepancy, bias.DISCREPANCY_LEFT), (lag, bias.LAG_LEFT)):
        assert_allclose(central(f, x), parts.left(left[name]), rtol=0, atol=1e-6 * np.abs(parts.total).max())


def test_every_preset_is_in_both_tables():
    assert set(bias.LAG_LEFT) - {"seq_dlc"} == set(bias.DISCREPANCY_LEFT) - {"seq_dlc"} == set(CORRECTIONS)


def test_by_horizon_is_the_split_of_the_problem_cut_there():
    for problem, mu, d in examples():
        table = bias.by_horizon(problem, mu, d, range(1, problem.horizon + 6))
        assert table["horizon"].to_list() == list(range(1, problem.horizon + 6))
        for row in table.iter_rows(named=True):
            cut = replace(problem, horizon=row["horizon"])
            parts = bias.split(cut, mu, d)
            expected = parts._asdict() | {"total": parts.total, "gradient": exact.gradient(cut, mu)}
            expected |= {"left_by_dlc": parts.total - parts.leading, "left_by_tis": parts.prefix + parts.downstream}
            for name, vector in expected.items():
                assert_allclose(row[name], np.linalg.norm(vector), rtol=1e-10, atol=1e-13)
        first = table.row(0, named=True)
        assert first["prefix"] == first["downstream"] == 0
        # The mean advantage of the only prefix is 0: with one token there is nothing for centring to remove.
        assert first["leading"] < 1e-15


def test_by_horizon_at_a_thousand_tokens_equals_the_split_there():
    rng = np.random.default_rng(3)
    machine = problems.state_machine(rng, 16, 4, 64)
    mu, d = log_policy(random_logits(rng, machine)), rng.normal(0.1, 0.1, machine.shape)
    table = bias.by_horizon(machine, mu, d, [1024, 3])
    for row, horizon in zip(table.iter_rows(named=True), (1024, 3), strict=True):
        parts = bias.split(replace(machine, horizon=horizon), mu, d)
        for name in bias.PARTS:
            assert_allclose(row[name], np.linalg.norm(getattr(parts, name)), rtol=1e-9)


@pytest.mark.parametrize("horizons", [[], [0, 4], [-1]])
def test_impossible_horizons_are_refused(horizons):
    problem, mu, d = examples()[0]
    with pytest.raises(BadInput, match="horizons"):
        bias.by_horizon(problem, mu, d, horizons)
