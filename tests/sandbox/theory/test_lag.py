"""Lag as a loop: matrices against enumeration, growth against the exact recursion, the sign of what it feeds."""

import numpy as np
import pytest
from hypothesis import given
from numpy.testing import assert_allclose

from sandbox.corrections import CORRECTIONS
from sandbox.tabular import exact, problems
from sandbox.tabular.policy import GivenOffset, log_policy, policies
from sandbox.tabular.problems import Problem
from sandbox.tabular.simulate import SimConfig
from sandbox.theory import delay, lag, levels
from tests.support import reference, strategies
from tests.support.strategies import random_logits


@given(strategies.problems_with_policies())
def test_products_equal_matrices_by_enumeration(case):
    problem, (p, mu, _) = case
    x = mu - p
    h, m, same, fisher = (lag.product(matrix)(x) for matrix in reference.lag_matrices(problem, p))
    close = {"rtol": 1e-6, "atol": 1e-7}
    assert_allclose(lag.feedback(problem, p, x, "centred"), h, rtol=1e-9, atol=1e-11)
    assert_allclose(lag.left_out(problem, p, x, "centred"), m, **close)
    expected = {"none": h, "seq_is": h + m, "tis": h + same, "dlc": h + same, "cis": h + same, "icepop": h + same}
    for name, value in expected.items():
        (
            assert_allclose(
                lag.applied_feedback(problem, p, x, SimConfig(CORRECTIONS[name], advantage="centred")), value, **close
            ),
            name,
        )
    form = levels.fisher_form(p, exact.occupancy(problem, p), x)
    assert_allclose(form, (x * fisher).sum(), rtol=1e-9, atol=1e-12)


@given(strategies.problems_with_policies())
def test_feedback_is_the_derivative_of_the_stale_update(case):
    """H x of THEORY section 5 against central differences of the exact update with the sampler held fixed."""
    problem, (p, mu, _) = case
    x, h = mu - p, 1e-5
    ahead, behind = (
        exact.expected_update(problem, policies(p + sign * h * x, p), CORRECTIONS["none"]) for sign in (1, -1)
    )
    assert_allclose(lag.feedback(problem, p, x, "centred"), (ahead - behind) / (2 * h), rtol=0, atol=1e-7)


def test_normalised_advantages_divide_everything_by_one_scale():
    problem, logits = lopsided(0.9)
    logp, x = log_policy(logits), np.random.default_rng(3).normal(0.2, 1, problem.shape)
    scale = exact.advantage_scale(problem, logp, "normalised")
    for of in (lag.feedback, lag.left_out):
        assert_allclose(of(problem, logp, x), of(problem, logp, x, "centred") / scale, rtol=1e-9)


def lopsided(top: float) -> tuple[Problem, np.ndarray]:
    """A small tree that rewards the best `top` of its sequences: rare success below 1/2, rare failure above."""
    problem = problems.sparse_tree(np.random.default_rng(0), depth=3, vocabulary=3, top=top)
    return problem, random_logits(np.random.default_rng(1), problem, 0.3)


@pytest.mark.parametrize("top", [0.1, 0.9])
def test_what_the_loop_adds_after_two_steps(top):
    """x_2 differs between the uncorrected and the exactly corrected run by -eta^2 M g0, to leading order in eta."""
    problem, logits = lopsided(top)
    logp, eta = log_policy(logits), 1e-4
    _, m, _, _ = reference.lag_matrices(problem, logp)
    none, weighted = (
        lag.path(problem, logits, SimConfig(CORRECTIONS[c], step_size=eta, steps=2, advantage="centred"))
        for c in ("none", "seq_is")
    )
    drift = exact.gradient(problem, logp)
    assert_allclose((none - weighted)[2] / eta**2, -lag.product(m)(drift), rtol=0.02, atol=1e-5)
    # The largest entry is far above the tolerance, so that a flipped sign fails.
    assert np.abs(lag.product(m)(drift)).max() > 1e-3


@pytest.mark.parametrize(("top", "feeds"), [(0.1, False), (0.9, True)])
def test_the_loop_damps_on_rare_success_and_feeds_on_rare_failure(top, feeds):
    """Along the drift -M is -E[A (g0' score)^2]: negative where the few large advantages are positive."""
    problem, logits = lopsided(top)
    logp = log_policy(logits)
    m = reference.lag_matrices(problem, logp)[1] / exact.advantage_scale(problem, logp, "normalised")
    effect = lag.loop_effect(problem, logits, lag.product(m), SimConfig(step_size=0.1, steps=30))
    assert effect.feeds == feeds
    sign = 1 if feeds else -1
    assert (sign * effect.table["excess"] > 0)[1:].all()
    drift = exact.gradient(problem, logp)
    assert sign * -(drift * lag.product(m)(drift)).sum() > 0
    gain = lag.loop_gain(m, 0.1)
    assert gain[0] > 1e-4
    assert gain[-1] < -1e-4
    assert_allclose(gain.sum(), -0.1 * np.trace(m), rtol=1e-9)


@pytest.mark.parametrize("log_offset", [0.0, 0.15])
def test_growth_predicted_is_growth_measured_and_the_error_is_second_order(log_offset):
    problem, logits = lopsided(0.9)
    offset = log_offset * np.random.default_rng(2).normal(0.3, 1, problem.shape)
    log_rollout = policies(logits, logits, offset).rollout
    m = reference.lag_matrices(problem, log_policy(logits))[1]
    scale = exact.advantage_scale(problem, log_rollout, "normalised")
    error, size = [], []
    for eta in (0.02, 0.01):
        measured = lag.path(problem, logits, SimConfig(step_size=eta, steps=20, discrepancy=GivenOffset(offset)))
        predicted = lag.predicted_path(
            problem, logits, lag.product(m / scale), SimConfig(step_size=eta, steps=20, discrepancy=GivenOffset(offset))
        )
        wrong = lag.predicted_path(
            problem,
            logits,
            lag.product(-m / scale),
            SimConfig(step_size=eta, steps=20, discrepancy=GivenOffset(offset)),
        )
        error.append(np.linalg.norm(measured[-1] - predicted[-1]))
        size.append(np.linalg.norm(measured[-1]))
        assert error[-1] < 0.2 * np.linalg.norm(measured[-1] - wrong[-1])
    assert error[0] < 0.02 * size[0]
    # Without discrepancy the error is third order in eta; with it the loop's own matrix is off by O(d), second order.
    assert error[0] / error[1] > (6 if log_offset == 0 else 3.3)


def test_left_out_without_a_matrix_gives_the_same_prediction():
    problem, logits = lopsided(0.1)
    logp = log_policy(logits)
    m = reference.lag_matrices(problem, logp)[1] / exact.advantage_scale(problem, logp, "normalised")
    by_matrix = lag.predicted_path(problem, logits, lag.product(m), SimConfig(step_size=0.2, steps=10))
    by_product = lag.predicted_path(
        problem, logits, lambda x: lag.left_out(problem, logp, x), SimConfig(step_size=0.2, steps=10)
    )
    assert_allclose(by_product, by_matrix, atol=1e-8)


def test_a_bandit_with_the_mean_baseline_has_no_feedback():
    problem = problems.bandit([0.0, 1.0, 3.0])
    logp, x = log_policy(np.array([[0.1, -0.2, 0.3]])), np.array([[0.5, -1.0, 0.2]])
    assert_allclose(lag.feedback(problem, logp, x), 0, atol=1e-12)
    assert np.abs(lag.left_out(problem, logp, x)).max() > 0.1


def test_prefixes_of_negative_mean_advantage_feed_their_lag():
    """A first token decides; behind the bad one the stale update runs away geometrically, behind the good one it dies
    down (both with a little drift of their own)."""
    transition = [[1, 2], [-1, -1], [-1, -1]]
    problem = Problem(transition, [[0, 0], [0.0, 0.1], [1.0, 1.1]], 2)
    logits = np.array([[0.2, 0.0], [0.1, 0.0], [0.0, 0.2]])
    h = reference.lag_matrices(problem, log_policy(logits))[0]
    blocks = [np.linalg.eigvalsh(h[2 * s : 2 * s + 2, 2 * s : 2 * s + 2]) for s in range(3)]
    assert blocks[1][-1] > 0.05  # behind the bad token
    assert blocks[2][0] < -0.05
    assert_allclose(blocks[0], 0, atol=1e-12)
    assert delay.spectral_radius(*delay.without_null(h, 0 * h), 0.5, 0) > 1.02


@pytest.mark.parametrize("name", ["tis", "dlc", "cis", "seq_is", "none"])
def test_linearised_with_the_applied_update_is_right_to_the_order_it_claims(name):
    """Var = x' F x is second order in eta; x is right to second order, so the relative error falls with eta."""
    problem, logits = lopsided(0.9)
    error = []
    for eta in (0.02, 0.01):
        curve, _ = levels.linearised(problem, logits, SimConfig(CORRECTIONS[name], step_size=eta, steps=20), 0.0)
        path = lag.path(problem, logits, SimConfig(CORRECTIONS[name], step_size=eta, steps=20))
        exactly = levels.fisher_form(log_policy(logits), exact.occupancy(problem, log_policy(logits)), path[-1])
        error.append(abs(curve[-1] / exactly - 1))
    assert error[0] < 0.02
    assert error[0] / error[1] > 3
    if name != "none":
        open_loop, _ = levels.linearised(problem, logits, SimConfig(step_size=0.02, steps=20), 0.0)
        closed, _ = levels.linearised(problem, logits, SimConfig(CORRECTIONS[name], step_size=0.02, steps=20), 0.0)
        assert abs(open_loop[-1] / closed[-1] - 1) > 5 * error[0]


def test_linearised_under_a_discrepancy_starts_from_the_biased_update():
    problem, logits = lopsided(0.1)
    offset = 0.3 * np.random.default_rng(2).normal(0.3, 1, problem.shape)
    curve, _ = levels.linearised(
        problem, logits, SimConfig(CORRECTIONS["dlc"], step_size=0.1, steps=3, discrepancy=GivenOffset(offset)), 0.0
    )
    first = exact.expected_update(problem, policies(logits, logits, offset), CORRECTIONS["dlc"], "normalised")
    visits = exact.occupancy(problem, log_policy(logits))
    assert_allclose(curve[0], levels.fisher_form(log_policy(logits), visits, 0.1 * first), rtol=1e-12)


@pytest.mark.parametrize("name", ["none", "tis", "dlc"])
def test_applied_feedback_under_a_discrepancy_is_that_of_the_biased_update(name):
    """Central differences of the slow enumeration, at another step width."""
    problem = problems.sparse_tree(np.random.default_rng(0), depth=2, vocabulary=3, top=0.4)
    rng = np.random.default_rng(4)
    logits, x, offset = (
        rng.normal(size=problem.shape),
        rng.normal(size=problem.shape),
        rng.normal(0.3, 0.6, problem.shape),
    )
    mu, h = log_policy(logits), 1e-4
    q = policies(logits, logits, offset).rollout
    ahead, behind = (
        reference.expected_update(problem, log_policy(logits + sign * h * x), mu, q, name) for sign in (1, -1)
    )
    value = lag.applied_feedback(
        problem, logits, x, SimConfig(CORRECTIONS[name], advantage="centred", discrepancy=GivenOffset(offset))
    )
    assert_allclose(value, (ahead - behind) / (2 * h), rtol=1e-5, atol=1e-7)
