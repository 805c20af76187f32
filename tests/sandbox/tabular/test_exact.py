"""Recursions against enumeration of every sequence, the gradient against finite differences, the identities."""

import functools
import math
from unittest import mock

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from numpy.testing import assert_allclose

from sandbox.corrections import CIS, CORRECTIONS, DLC, Truncate
from sandbox.errors import BadInput
from sandbox.tabular import enumeration, exact, problems
from sandbox.tabular.policy import Policies, log_policy, policies
from sandbox.tabular.problems import Problem
from tests.support import reference, strategies
from tests.support.strategies import random_logits

close = functools.partial(assert_allclose, rtol=1e-10, atol=1e-12)


@given(strategies.problems_with_policies())
def test_scalars_equal_enumeration(case):
    problem, (pi, mu, q) = case
    for p, d in ((pi, mu), (mu, q), (pi, q)):
        close(exact.ess(problem, p, d), reference.ess(problem, p, d))
        assert_allclose(exact.renyi2(problem, p, d), -math.log(reference.ess(problem, p, d)), rtol=1e-10, atol=1e-11)
        close(exact.variance_log_ratio(problem, p, d), reference.variance_log_ratio(problem, p, d))
        close(exact.kl(problem, p, d), reference.kl(problem, p, d))
        close(exact.token_kl(problem, p, d), reference.token_kl(problem, p, d))
    close(exact.expectation(problem, pi, problem.reward), reference.returns(problem, pi))
    variance = exact.variance(problem, q, problem.reward)
    close(variance, reference.return_sd(problem, q) ** 2)
    close(exact.occupancy(problem, q), reference.visits(problem, q))
    expected = reference.lag_ess_under_sampler(problem, pi, mu, q)
    close(exact.lag_ess_under_sampler(problem, case[1]), expected)


@pytest.mark.parametrize("name", exact.EXACT_CORRECTIONS)
@given(case=strategies.problems_with_policies(), normalised=st.booleans())
def test_expected_update_equals_enumeration(name, case, normalised):
    problem, three = case
    advantage = "normalised" if normalised else "centred"
    update = exact.expected_update(problem, three, CORRECTIONS[name], advantage)
    expected = reference.expected_update(problem, three.train, three.sync, three.rollout, name, normalised)
    # A return that is all but constant makes the normalised advantage a ratio of roundings.
    scale = 1.0 if not normalised else 1 / (reference.return_sd(problem, three.rollout) + 1e-6)
    assert_allclose(update, expected, rtol=1e-10, atol=1e-12 * scale)


@given(strategies.problems_with_policies())
def test_gradient_equals_finite_differences(case):
    problem, (pi, _, _) = case
    assert_allclose(exact.gradient(problem, pi), reference.gradient(problem, pi), rtol=0, atol=1e-6)


@given(strategies.problems_with_policies(), st.integers(0, 2**32))
def test_gradient_equals_finite_differences_to_six_digits(case, seed):
    """Along one direction, by fourth-order differences: relative to the size of the gradient."""
    problem, (pi, _, _) = case
    x = np.random.default_rng(seed).normal(0.5, 1, problem.shape)

    def value(step: float) -> float:
        return float(exact.expectation(problem, log_policy(pi + step * x), problem.reward))

    h = 1e-3
    slope = (8 * (value(h) - value(-h)) - value(2 * h) + value(-2 * h)) / (12 * h)
    gradient = exact.gradient(problem, pi)
    assert_allclose(
        slope, (gradient * x).sum(), rtol=0, atol=1e-6 * np.linalg.norm(gradient) * np.linalg.norm(x) + 1e-11
    )


def test_the_gradient_of_the_kl_to_uniform_where_responses_end_early():
    """Central differences. Their length then depends on the policy, and the constant log V of every token counts."""
    transition = [[1, -1, 2], [2, 1, -1], [-1, 0, 1]]
    problem = Problem(transition, np.zeros((3, 3)), 5)
    logits, h = random_logits(np.random.default_rng(0), problem), 1e-5
    uniform = np.full((3, 3), -math.log(3))
    slope = np.empty((3, 3))
    for index in np.ndindex(3, 3):
        unit = np.zeros((3, 3))
        unit[index] = h
        ahead, behind = (reference.kl(problem, log_policy(logits + s * unit), uniform) for s in (1, -1))
        slope[index] = (ahead - behind) / (2 * h)
    assert_allclose(exact.kl_gradient(problem, log_policy(logits)), slope, rtol=1e-6, atol=1e-9)


@given(strategies.problems_with_policies())
def test_renyi_divergence_is_at_least_the_kl_which_is_at_least_0(case):
    problem, (pi, mu, q) = case
    for p, other in ((pi, mu), (mu, q), (q, pi)):
        assert exact.renyi2(problem, p, other) >= exact.kl(problem, p, other) - 1e-13 >= -2e-13
        assert 0 < exact.ess(problem, p, other) <= 1 + 1e-13
    assert abs(exact.renyi2(problem, pi, pi)) < 1e-13
    assert exact.kl(problem, q, q) == exact.token_kl(problem, q, q) == 0


@given(strategies.problems_with_policies(), st.floats(0.1, 3), st.floats(0.1, 3))
def test_a_higher_cap_never_lowers_a_weight_and_none_at_all_is_importance_sampling(case, one, other):
    _, three = case
    low, high = sorted((one, other))
    importance = np.exp(three.train - three.rollout)
    for make in (lambda cap: Truncate("token", math.exp(cap)), lambda cap: CIS(cap)):
        weights = [exact.token_weights(three, make(cap)).weight for cap in (low, high, math.inf)]
        assert np.all(weights[0] <= weights[1] * (1 + 1e-14))
        assert np.all(weights[1] <= weights[2] * (1 + 1e-14))
        assert_allclose(weights[2], importance, rtol=1e-13)
        second = [(np.exp(three.rollout) * w**2).sum(axis=1) for w in weights[:2]]
        assert np.all(second[0] <= math.exp(low) * (1 + 1e-12))  # THEORY section 7, and min(rho, C) <= C


@given(strategies.problems_with_policies())
def test_on_policy_every_correction_gives_the_gradient(case):
    problem, (pi, _, _) = case
    three = policies(pi, pi)
    for name in exact.EXACT_CORRECTIONS:
        update = exact.expected_update(problem, three, CORRECTIONS[name])
        close(update, exact.gradient(problem, pi), err_msg=name)


@given(strategies.problems_with_policies())
def test_dlc_at_zero_lag_is_the_gradient_of_the_samplers_own_return(case):
    """THEORY section 4: what centring leaves is not noise but another target."""
    problem, (_, mu, q) = case
    update = exact.expected_update(problem, policies(mu, mu)._replace(rollout=q), CORRECTIONS["dlc"])
    close(update, exact.gradient(problem, q))


@given(strategies.problems_with_policies())
def test_dlc_is_truncated_importance_sampling_where_there_is_no_discrepancy_and_nothing_is_clipped(case):
    """c is proportional to q r = pi then, so centring changes nothing; a clip or an offset tells the two apart."""
    problem, (pi, mu, _) = case
    three = policies(mu + 0.2 * (pi - mu), mu)
    dlc, tis = (exact.expected_update(problem, three, CORRECTIONS[name]) for name in ("dlc", "tis"))
    close(dlc, tis)


def test_the_corrections_differ_where_the_mismatch_is_large():
    """The equalities above would also hold of updates that are all the same."""
    rng = np.random.default_rng(0)
    problem = problems.tree(3, 3, rng.normal(1, 1, 27))
    sampler = random_logits(rng, problem)
    three = policies(sampler + rng.normal(0.5, 1, problem.shape), sampler, rng.normal(0.2, 0.8, problem.shape))
    updates = exact.expected_updates(problem, three, {c: CORRECTIONS[c] for c in exact.EXACT_CORRECTIONS})
    names = list(updates)
    for i, first in enumerate(names):
        for second in names[i + 1 :]:
            assert np.abs(updates[first] - updates[second]).max() > 1e-3, (first, second)


@pytest.mark.parametrize("name", ["seq_tis", "seq_mis", "ppo", "seq_dlc"])
@given(case=strategies.problems_with_policies(), normalised=st.booleans())
def test_expected_update_of_whole_sequences_equals_enumeration(name, case, normalised):
    problem, three = case
    correction = DLC("sequence") if name == "seq_dlc" else CORRECTIONS[name]
    log_weight = {"seq_dlc": three.train - three.sync}.get(name, three.train - three.rollout)
    for e in reference.episodes(problem):  # a weight that equals a bound to rounding falls on either side
        assume(abs(reference.log_prob(log_weight, e) - math.log(2)) > 1e-9)
        assume(abs(reference.reward(problem, e) - reference.returns(problem, three.rollout)) > 1e-9)
    update = exact.expected_update(problem, three, correction, "normalised" if normalised else "centred")
    expected = reference.expected_update(problem, three.train, three.sync, three.rollout, name, normalised)
    scale = 1.0 if not normalised else 1 / (reference.return_sd(problem, three.rollout) + 1e-6)
    assert_allclose(update, expected, rtol=1e-10, atol=1e-12 * scale)


@given(strategies.small_problems)
def test_sequences_are_all_of_them(problem):
    every = [[s * problem.shape[1] + a for s, a in e] for e in reference.episodes(problem)]
    expected = sorted([*e, *[-1] * (problem.horizon - len(e))] for e in every)
    assert sorted(enumeration.sequences(problem).tolist()) == expected
    assert math.isclose(enumeration.count(problem), len(expected), rel_tol=1e-12)


@pytest.mark.parametrize("horizon", [21, 5000])
def test_too_many_sequences_are_refused_with_their_number(horizon):
    problem = problems.state_machine(np.random.default_rng(0), 3, 2, horizon)
    zero = np.zeros(problem.shape)
    number = "2.1e[+]06" if horizon == 21 else "inf"
    with pytest.raises(BadInput, match=f"correction seq_tis has no recursion, and there are {number} sequences"):
        exact.expected_update(problem, policies(zero, zero), CORRECTIONS["seq_tis"])


def test_a_truncated_sequence_weight_over_many_sequences():
    """2^16 of them, in several chunks; 2^20 are still allowed. Untruncated they give the gradient of the recursion."""
    rng = np.random.default_rng(0)
    assert enumeration.count(problems.state_machine(rng, 3, 2, 20)) == pytest.approx(enumeration.MOST)
    problem = problems.state_machine(rng, 3, 2, 16)
    sampler = random_logits(rng, problem)
    three = policies(sampler + 0.8 * rng.normal(size=problem.shape), sampler)
    never = Truncate("sequence", 1e9)  # truncates nothing here
    with mock.patch.object(enumeration, "CHUNK", 2**18):
        update = exact.expected_update(problem, three, never)
    assert_allclose(update, exact.gradient(problem, three.train), rtol=1e-9, atol=1e-12)
    truncated = exact.expected_update(problem, three, CORRECTIONS["seq_tis"])
    assert np.abs(truncated - update).max() > 0.01 * np.abs(update).max()


def test_an_unknown_advantage_is_refused():
    problem = problems.bandit([0.0, 1.0])
    with pytest.raises(BadInput, match="advantage is 'raw'"):
        exact.advantage_scale(problem, np.log(np.full((1, 2), 0.5)), "raw")


@given(strategies.problems_with_policies(), st.integers(0, 2**32))
def test_leading_axes_are_runs(case, seed):
    problem, (pi, mu, q) = case
    other = log_policy(random_logits(np.random.default_rng(seed), problem))
    stack = np.stack([pi, other])
    for function in (exact.ess, exact.kl, exact.token_kl, exact.variance_log_ratio):
        close(function(problem, stack, q), [function(problem, pi, q), function(problem, other, q)])
    three = policies(stack, np.stack([mu, q]), np.stack([q, pi]))
    for name in reference.FACTORED:
        both = exact.token_weights(three, CORRECTIONS[name])
        for run in range(2):
            alone = exact.token_weights(type(three)(*(p[run] for p in three)), CORRECTIONS[name])
            close(both.weight[run], alone.weight)
            close(both.centre[run], alone.centre)


def test_long_responses_neither_overflow_nor_lose_digits():
    """T = 65,536, an ESS of about e^-500: one state, so that D2, KL and variance are T times those of one token; four
    states, against the scaled T-th power of the kernel matrix by repeated squaring."""
    rng = np.random.default_rng(1)
    horizon = 2**16
    one = Problem(np.zeros((1, 4), dtype=int), np.array([[0.0, 1.0, 2.0, 5.0]]), horizon)
    p, q = (log_policy(x) for x in (np.array([[0.1, 0.0, 0.3, -0.2]]), np.array([[0.2, 0.05, 0.27, -0.3]])))
    token = np.exp(q) * (np.exp(p) / np.exp(q)) ** 2
    assert_allclose(exact.renyi2(one, p, q), horizon * math.log(token.sum()), rtol=1e-9)
    assert -math.log(exact.ess(one, p, q)) > 100
    assert_allclose(exact.kl(one, p, q), horizon * (np.exp(p) * (p - q)).sum(), rtol=1e-9)
    ratio = p - q
    spread = (np.exp(q) * ratio**2).sum() - (np.exp(q) * ratio).sum() ** 2
    assert_allclose(exact.variance_log_ratio(one, p, q), horizon * spread, rtol=1e-9)

    four = problems.state_machine(rng, 4, 3, horizon)
    logits = random_logits(rng, four)
    three = policies(logits, logits, 0.09 * rng.normal(size=four.shape))
    kernel = np.zeros((4, 4))
    np.add.at(kernel, (np.arange(4)[:, None], four.transition), np.exp(2 * three.sync - three.rollout))
    log_scale = 0.0
    for _ in range(16):
        kernel = kernel @ kernel
        log_scale = 2 * log_scale + math.log(kernel.max())
        kernel /= kernel.max()
    d2 = log_scale + math.log(kernel[0].sum())
    assert 100 < d2 < 1500
    assert_allclose(exact.renyi2(four, three.sync, three.rollout), d2, rtol=1e-9)

    far = policies(logits, logits, 2.0 * rng.normal(size=four.shape))
    assert exact.renyi2(four, far.sync, far.rollout) > 10_000
    assert exact.ess(four, far.sync, far.rollout) == 0.0


def test_report_carries_the_recursions_under_the_right_names():
    rng = np.random.default_rng(2)
    problem = problems.tree(3, 2, rng.normal(1, 1, 8))
    sampler = random_logits(rng, problem)
    three = policies(sampler + rng.normal(0.3, 0.5, problem.shape), sampler, rng.normal(0.2, 0.4, problem.shape))
    pi, mu, q = three
    report = exact.report(problem, three)
    assert math.isclose(report.return_train, reference.returns(problem, pi))
    assert math.isclose(report.return_sampler, reference.returns(problem, q))
    assert math.isclose(report.kl_train_sampler, reference.kl(problem, pi, q))
    assert math.isclose(report.kl_sampler_train, reference.kl(problem, q, pi))
    assert math.isclose(report.token_kl_on_sampler_prefixes, reference.token_kl(problem, pi, q))
    for name, pair in {"lag": (pi, mu), "discrepancy": (mu, q), "total": (pi, q)}.items():
        assert math.isclose(report.ess[name], reference.ess(problem, *pair))
        assert math.isclose(report.renyi2[name], -math.log(report.ess[name]))
    assert math.isclose(report.ess["lag_under_sampler"], reference.lag_ess_under_sampler(problem, pi, mu, q))
    close(report.bias["tis"], report.expected_update["tis"] - report.gradient)
    assert np.all(report.bias["seq_is"] == 0)


def test_per_token_kl_does_not_see_what_the_sequence_ess_sees():
    """THEORY section 3: S = 64, V = 32, discrepancy sd .02: the ESS falls with T, the per-token KL stays."""
    rng = np.random.default_rng(0)
    kls, sizes = [], []
    for horizon in (256, 1024, 4096):
        problem = problems.state_machine(np.random.default_rng(1), 64, 32, horizon)
        rng = np.random.default_rng(2)
        logits = random_logits(rng, problem)
        three = policies(logits, logits, 0.02 * rng.normal(size=problem.shape))
        kls.append(exact.token_kl(problem, three.train, three.rollout))
        sizes.append(exact.ess(problem, three.train, three.rollout))
    assert_allclose(kls, 1.8e-4, rtol=0.15)
    assert sizes[0] > 0.88
    assert 0.6 < sizes[1] < 0.75
    assert 0.15 < sizes[2] < 0.3


@pytest.mark.parametrize("name", ["none", "seq_tis", "ppo", "dlc", "seq_dlc"])
@given(case=strategies.problems_with_policies())
def test_variance_of_one_responses_update_equals_enumeration(name, case):
    problem, (train, sync, rollout) = case
    baseline, scale = reference.returns(problem, rollout) + 0.1, 0.7
    mean, square = np.zeros(problem.shape), 0.0
    for e in reference.episodes(problem):
        advantage = (reference.reward(problem, e) - baseline) / scale
        update = reference.response_update(name, train, sync, rollout, e, advantage)
        probability = math.exp(reference.log_prob(rollout, e))
        mean, square = mean + probability * update, square + probability * float((update**2).sum())
    correction = (CORRECTIONS | {"seq_dlc": DLC("sequence")})[name]
    variance = enumeration.update_variance(problem, Policies(train, sync, rollout), correction, baseline, scale)
    assert math.isclose(variance, square - float((mean**2).sum()), rel_tol=1e-9, abs_tol=1e-12 * (1 + square))
