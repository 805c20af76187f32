"""Both routes of every recursion against each other and against the plain recursion of a long machine."""

import math
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_allclose

from sandbox.corrections import CORRECTIONS
from sandbox.tabular import exact, problems, recursions
from sandbox.tabular.policy import log_policy, policies
from sandbox.tabular.problems import Problem
from tests.support import reference, strategies
from tests.support.strategies import random_logits


@given(strategies.problems_with_policies())
def test_the_routes_agree(case):
    problem, (pi, mu, q) = case
    kernel, reward = 2 * pi - q, problem.reward
    source = (np.exp(q) * reward).sum(axis=1)
    moving = source + np.arange(problem.horizon)[:, None] * np.arange(1.0, problem.shape[0] + 1)

    def every() -> list[np.ndarray]:
        past = recursions.past_moments(problem, q, 2)
        future, moved = recursions.values(problem, q, source), recursions.values(problem, q, moving)
        start = problem.initial
        results = [recursions.log_sum(problem, kernel), recursions.expectation(problem, q, reward), past]
        results += [recursions.past_moments(problem, q, 1, mu - q), future[0, start], moved[0, start]]
        # Values are meant for states that can occur at t: at 0 that is the initial one.
        results.append(recursions.ahead(problem, q * reward, future)[0, start])
        return [*results, recursions.meeting(problem, past[1], future), recursions.meeting(problem, past[0], moved)]

    with mock.patch.object(recursions, "small", return_value=True):
        dense = every()
        total, lost = recursions.log_sum_by_squaring(problem, kernel)
        assert lost < 1e-14
        assert_allclose(total, dense[0], rtol=0)
    with mock.patch.object(recursions, "small", return_value=False):
        plain = every()
    for one, other in zip(dense, plain, strict=True):
        assert_allclose(one, other, rtol=1e-11, atol=1e-12)


@given(strategies.problems_with_policies())
def test_past_moments_and_values_are_expectations(case):
    problem, (pi, _, q) = case
    moments = recursions.past_moments(problem, q, 2, pi)
    for t in range(problem.horizon):
        for state in range(problem.shape[0]):
            for order in range(3):

                def f(e, t=t, state=state, order=order):
                    there = len(e) > t and e[t][0] == state
                    return sum(pi[x] for x in e[:t]) ** order if there else 0.0

                assert_allclose(moments[order, t, state], reference.mean(problem, q, f), rtol=1e-10, atol=1e-12)
    value = recursions.values(problem, q, (np.exp(q) * problem.reward).sum(axis=1))
    assert_allclose(value[0, problem.initial], reference.returns(problem, q), rtol=1e-10, atol=1e-12)
    assert np.all(value[-1] == 0)
    assert np.all(value[:, -1] == 0)


@pytest.mark.parametrize("ends", [False, True])
def test_a_long_machine_equals_the_plain_recursion(ends):
    """T = 500: not a power of two, so that every branch of the squaring is taken."""
    rng = np.random.default_rng(4)
    base = problems.state_machine(rng, 12, 8, 500)
    transition = np.array(base.transition)
    if ends:  # some 150 tokens on average
        transition[3, 2] = transition[7, 5] = -1
    problem = Problem(transition, base.reward + 0.01 * rng.normal(size=base.shape), 500, 5)
    assert recursions.small(problem)
    sampler = random_logits(rng, problem)
    three = policies(sampler + rng.normal(0.02, 0.06, base.shape), sampler, rng.normal(0.01, 0.05, base.shape))
    pi, mu, q = three
    for p, other in ((pi, mu), (mu, q), (pi, q), (q, pi)):
        assert_allclose(exact.renyi2(problem, p, other), reference.long_log_sum(problem, 2 * p - other), rtol=1e-10)
        expected = reference.long_values(problem, p, p - other)[-1, problem.initial]
        assert_allclose(exact.kl(problem, p, other), expected, rtol=1e-10)
    expected = reference.long_advantage_visits(problem, q)
    assert_allclose(exact.advantage_visits(problem, q), expected, rtol=1e-10, atol=1e-10 * np.abs(expected).max())
    for name in reference.FACTORED:
        weight, centre = exact.token_weights(three, CORRECTIONS[name])
        mass = expected * np.exp(q) * weight
        update = mass - centre * mass.sum(axis=1, keepdims=True)
        got = exact.expected_update(problem, three, CORRECTIONS[name])
        assert_allclose(got, update, rtol=1e-10, atol=1e-10 * np.abs(update).max())


def test_underflow_is_noticed_and_avoided():
    """A part of the machine that is never reached grows by e per step; in linear space it drowns all the rest."""
    horizon = 4096
    problem = Problem([[0, 0], [1, 1]], np.zeros((2, 2)), horizon)
    kernel = np.array([[-0.7, -0.8], [1.0, 0.5]])
    assert recursions.small(problem)
    assert not recursions.log_sum_by_squaring(problem, kernel)[1] < recursions.NEGLIGIBLE
    expected = horizon * math.log(math.exp(-0.7) + math.exp(-0.8))
    assert_allclose(recursions.log_sum(problem, kernel), expected, rtol=1e-12)
    # Enormous growth and enormous decay, on the way to the end too.
    ending = Problem([[0, -1]], np.zeros((1, 2)), horizon)
    for scale in (300.0, -300.0, 600.0):
        kernel = np.array([[scale, scale - 1.0]])
        assert_allclose(recursions.log_sum(ending, kernel), reference.long_log_sum(ending, kernel), rtol=1e-12)


@given(strategies.problems_with_policies(), st.integers(0, 2**32))
def test_leading_axes_are_runs_on_both_routes(case, seed):
    problem, (pi, mu, q) = case
    rng = np.random.default_rng(seed)
    other = log_policy(random_logits(rng, problem))
    f = rng.normal(size=(3, 1, *problem.shape))
    stack = np.stack([q, other])
    for route in (True, False):
        with mock.patch.object(recursions, "small", return_value=route):
            sums = recursions.log_sum(problem, np.stack([2 * pi - mu, other]))
            assert_allclose(sums[0], recursions.log_sum(problem, 2 * pi - mu), rtol=1e-12, atol=1e-12)
            assert_allclose(sums[1], recursions.log_sum(problem, other), rtol=1e-12, atol=1e-12)
            values = recursions.expectation(problem, stack, f)
            assert values.shape == (3, 2)
            for i in range(3):
                for run in range(2):
                    alone = recursions.expectation(problem, stack[run], f[i, 0])
                    assert_allclose(values[i, run], alone, rtol=1e-11, atol=1e-12)
