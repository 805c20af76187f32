"""Symbolic against numeric at random points, to 1e-12 relative; and the steps of each derivation."""

import math

import numpy as np
import pytest
import sympy as sp
from numpy.testing import assert_allclose

from sandbox.batch import Batch
from sandbox.corrections import CIS, CORRECTIONS
from sandbox.tabular import exact, problems
from sandbox.tabular.policy import log_policy, policies
from sandbox.tabular.simulate import SimConfig
from sandbox.theory import delay, lag, levels
from tests.support import derivations, reference
from tests.support.derivations import CAP, ETA, MU, R0, R1, THRESHOLD, P, Q

POINTS = range(8)


def value(expression: sp.Expr, where: dict) -> float:
    """30 digits, then rounded once."""
    return float(sp.N(expression.subs({k: sp.Float(v, 30) for k, v in where.items()}), 30))


def bandit(seed: int):
    """Rewards, and the logits of trainer and sampler of a two-armed bandit; arm 0 of the code is arm 1 here."""
    rng = np.random.default_rng(seed)
    rewards, trainer, sampler = rng.normal(1, 1, 2), rng.normal(0.3, 1, (1, 2)), rng.normal(-0.2, 1, (1, 2))
    p, q = (float(np.exp(log_policy(x))[0, 0]) for x in (trainer, sampler))
    return problems.bandit(rewards), policies(trainer, sampler), {P: p, Q: q, MU: q, R1: rewards[0], R0: rewards[1]}


@pytest.mark.parametrize("seed", POINTS)
def test_two_armed_bandit(seed):
    problem, three, where = bandit(seed)
    one = {"rtol": 1e-12}
    assert_allclose(float(exact.ess(problem, three.train, three.rollout)), value(derivations.ESS, where), **one)
    assert_allclose(float(exact.renyi2(problem, three.train, three.rollout)), value(derivations.D2, where), **one)
    gradient = value(derivations.gradient(), where)
    assert_allclose(exact.gradient(problem, three.train)[0], [gradient, -gradient], **one)
    updates = exact.expected_updates(problem, three, {name: CORRECTIONS[name] for name in ("none", "seq_is", "tis")})
    bias = value(derivations.bias_none(), where)
    assert_allclose(updates["none"][0], [gradient + bias, -gradient - bias], **one)
    assert derivations.bias_sequence_weights() == 0
    assert_allclose(updates["seq_is"], exact.gradient(problem, three.train), **one)


@pytest.mark.parametrize("seed", POINTS)
def test_loop_gain_of_the_bandit(seed):
    problem, three, where = bandit(seed)
    h, m, _, _ = reference.lag_matrices(problem, three.sync)
    symbolic = np.array(derivations.lag_matrix().subs({k: sp.Float(v, 30) for k, v in where.items()}), dtype=float)
    assert_allclose(m, symbolic, rtol=1e-12)
    assert_allclose(h, 0, atol=1e-15)
    gain = value(derivations.loop_gain(), where | {ETA: 0.3})
    numeric = lag.loop_gain(m, 0.3)
    assert_allclose(numeric[np.argmax(np.abs(numeric))], gain, rtol=1e-12)
    x = np.array([[0.7, -0.4]])
    assert_allclose(lag.left_out(problem, three.sync, x, "centred")[0], symbolic @ x[0], rtol=1e-8, atol=1e-10)


def test_loop_gain_feeds_where_the_better_arm_is_the_likelier_one():
    gain = derivations.loop_gain().subs({R1: 1, R0: 0, ETA: 1})
    assert gain.subs(MU, sp.Rational(3, 4)) > 0
    assert gain.subs(MU, sp.Rational(1, 4)) < 0
    assert sp.simplify(derivations.loop_gain() - -2 * ETA * (R1 - R0) * MU * (1 - MU) * (1 - 2 * MU)) == 0


@pytest.mark.parametrize("mu", [0.03, 0.2, 0.35])
@pytest.mark.parametrize("threshold", [0.5, 0.7])
def test_collapse_step_of_the_bandit_is_that_of_the_mean_field(mu, threshold):
    problem, eta = problems.bandit([1.3, 0.1]), 0.05
    logits = np.array([[math.log(mu / (1 - mu)), 0.0]])
    probability, steps = derivations.collapse()
    where = {MU: mu, R1: 1.3, R0: 0.1, ETA: eta, THRESHOLD: threshold}
    at = value(probability, where)
    p = log_policy(np.array([[math.log(at / (1 - at)), 0.0]]))
    assert_allclose(float(exact.ess(problem, p, log_policy(logits))), threshold, rtol=1e-12)
    exactly = value(steps, where)
    field = levels.mean_field(
        problem,
        logits,
        SimConfig(step_size=eta, steps=math.ceil(exactly) + 3, advantage="centred"),
        threshold=threshold,
    )
    assert field.ess_step == math.ceil(exactly)
    # Between the two the ESS passes the threshold at the real number that the formula gives.
    curve = field.table["ess"]
    assert curve[math.ceil(exactly) - 1] < threshold <= curve[math.ceil(exactly) - 2]


def test_a_bandit_that_prefers_the_better_arm_never_collapses():
    field = levels.mean_field(problems.bandit([1.0, 0.0]), np.array([[0.1, 0.0]]), SimConfig(step_size=1.0, steps=400))
    assert math.isinf(field.ess_step)
    assert derivations.collapse().probability.subs({MU: 0.55, THRESHOLD: 0.5}) > 1


@pytest.mark.parametrize("arms", [2, 3])
def test_variance_of_the_log_ratio_is_the_fisher_form_to_second_order(arms):
    series, form, _, _ = derivations.variance_series(arms)
    assert sp.simplify(series - form) == 0


@pytest.mark.parametrize("k", [1, 2, 3, 5])
def test_drift_grows_as_k_squared_and_noise_as_k(k):
    expected, claimed = derivations.quadratic_in_steps(k)
    assert sp.simplify(expected - claimed) == 0


@pytest.mark.parametrize("seed", POINTS)
def test_closed_form_equals_the_symbolic_expansion(seed):
    rng = np.random.default_rng(seed)
    rewards, logits = rng.normal(1, 1, 3), rng.normal(0.2, 1, (1, 3))
    terms = derivations.expansion(3)
    probability = np.exp(log_policy(logits))[0]
    where = dict(zip(terms.p, probability, strict=True)) | dict(zip(terms.r, rewards, strict=True))
    where |= {terms.n: 37, ETA: 0.4}
    closed = levels.closed_form(problems.bandit(rewards), logits, 0.4, 37, "centred")
    assert_allclose([closed.a, closed.b], [value(terms.a, where), value(terms.b, where)], rtol=1e-12)


@pytest.mark.parametrize("seed", POINTS)
def test_cis_weights_reach_the_symbolic_cap_and_stay_below_it(seed):
    rng = np.random.default_rng(seed)
    cap = float(rng.uniform(0.1, 1.5))
    p, q = (log_policy(rng.normal(0.2, 2, (1, 6))) for _ in range(2))
    bound = derivations.cis_bound()
    ones = np.ones((1, 6))
    weight = CIS(cap)(Batch(p, q, ones > 0, ones)).weight[0]
    caps = np.array([value(bound.weight_cap, {Q: x, CAP: cap}) for x in np.exp(q[0])])
    assert_allclose(weight, np.minimum(np.exp(p - q)[0], caps), rtol=1e-12)
    assert (np.exp(q[0]) * weight**2).sum() <= math.exp(cap)
    slack = np.array([value(bound.slack, {Q: x, CAP: cap}) for x in np.exp(q[0])])
    assert_allclose(caps + slack, math.exp(cap), rtol=1e-12)


def test_cis_slack_is_never_negative():
    """e^c q (e^c - 1) / (1 + q (e^c - 1)), every factor of it >= 0 once e^c is written 1 + t with t > 0."""
    t = sp.Symbol("t", positive=True)
    slack = sp.simplify(derivations.cis_bound().slack.subs(CAP, sp.log(1 + t)))
    assert sp.simplify(slack - (1 + t) * Q * t / (1 + Q * t)) == 0
    assert ((1 + t) * Q * t / (1 + Q * t)).is_positive


@pytest.mark.parametrize("tau", range(7))
def test_levin_may_bound(tau):
    result = derivations.levin_may()
    critical = result.critical.subs(result.tau, tau)
    assert_allclose(delay.critical_gain(tau), float(sp.N(critical, 30)), rtol=1e-12)
    # The root is on the unit circle at that angle, exactly, and on no angle before is the gain real and positive.
    z = sp.exp(sp.I * result.angle.subs(result.tau, tau))
    assert abs(sp.N(z ** (tau + 1) - z**tau + critical, 30)) < 1e-25
    imaginary = sp.lambdify(result.w, result.imaginary.subs(result.tau, tau))
    first = float(result.angle.subs(result.tau, tau))
    assert np.all(imaginary(np.linspace(1e-3, first - 1e-3, 500)) < 0)
    gain = sp.lambdify(result.w, result.gain.subs(result.tau, tau))
    later = [(2 * j + 1) * first for j in range(1, tau + 1)]
    assert all(not 0 < gain(w) <= float(critical) for w in later)
