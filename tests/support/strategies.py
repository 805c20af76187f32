"""Hypothesis strategies, all in one place: small problems (a few hundred sequences), policies, offsets, batches.

Asymmetric on purpose: rewards, logits, lags and offsets lean to one side, so that a flipped sign cannot cancel.
"""

import math

import numpy as np
from hypothesis import assume
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from sandbox.batch import Batch
from sandbox.tabular import problems
from sandbox.tabular.policy import Policies, log_policy, policies, policies_of
from sandbox.tabular.problems import Case, Problem

BOUNDS = (0.5, 0.8, 1.2, 2.0, 5.0)  # of the presets; a ratio that equals one to rounding falls on either side


def tables(shape: tuple[int, int], low: float, high: float) -> st.SearchStrategy[np.ndarray]:
    return arrays(float, shape, elements=st.floats(low, high, allow_subnormal=False))


@st.composite
def machines(draw: st.DrawFn) -> Problem:
    """Any Problem: repeated states, early ends, unreachable states; rewards in [-1, 3]."""
    states, vocabulary = draw(st.integers(1, 4)), draw(st.integers(2, 3))
    horizon = draw(st.integers(1, 5 if vocabulary == 2 else 4))
    transition = draw(arrays(np.int64, (states, vocabulary), elements=st.integers(-1, states - 1)))
    reward = draw(tables((states, vocabulary), -1, 3))
    return Problem(transition, reward, horizon, draw(st.integers(0, states - 1)))


@st.composite
def trees(draw: st.DrawFn) -> Problem:
    depth, vocabulary = draw(st.sampled_from([(1, 3), (2, 2), (2, 3), (3, 2)]))
    return problems.tree(
        depth, vocabulary, draw(arrays(float, vocabulary**depth, elements=st.floats(-1, 3, allow_subnormal=False)))
    )


small_problems = st.one_of(machines(), trees())


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """A problem with its weights: lag in [-.5, 1.5] and offset in [-.4, .8] on top of logits in [-1, 2]."""
    problem = draw(small_problems)
    sampler = draw(tables(problem.shape, -1, 2))
    lag, offset = draw(tables(problem.shape, -0.5, 1.5)), draw(tables(problem.shape, -0.4, 0.8))
    result = policies(sampler + lag, sampler, offset)
    for numerator, denominator in ((result.train, result.rollout), (result.train, result.sync)):
        for bound in BOUNDS:
            assume(np.abs(numerator - denominator - math.log(bound)).min() > 1e-9)
    # In log-odds too, where CIS truncates.
    odds = [logp - np.log1p(-np.exp(logp)) for logp in (result.train, result.rollout)]
    assume(np.abs(odds[0] - odds[1] - math.log(2)).min() > 1e-9)
    return Case(problem, sampler + lag, sampler, offset)


def problems_with_policies() -> st.SearchStrategy[tuple[Problem, Policies]]:
    """A problem and its pi, mu, q."""
    return cases().map(lambda case: (case.problem, policies_of(case)))


@st.composite
def batches(draw: st.DrawFn) -> Batch:
    """A whole Batch of up to 4 x 5 tokens over 2 to 4 words; the masked places hold nan and -inf."""
    shape = draw(st.integers(1, 4)), draw(st.integers(1, 5))
    vocabulary = draw(st.integers(2, 4))
    token = draw(arrays(np.int64, shape, elements=st.integers(0, vocabulary - 1)))
    mask = draw(arrays(bool, shape))
    logits = draw(arrays(float, (*shape, vocabulary), elements=st.floats(-1, 2, allow_subnormal=False)))
    fields = {}
    for name, low, high in (("rollout", -0.0, 0.0), ("sync", -0.4, 0.8), ("old", -0.3, 0.6), ("train", -0.5, 1.5)):
        logits = logits + draw(arrays(float, logits.shape, elements=st.floats(low, high, allow_subnormal=False)))
        every = log_policy(logits)
        drawn = np.take_along_axis(every, token[..., None], axis=-1)[..., 0]
        junk = draw(st.sampled_from([np.nan, -np.inf, -9999.0]))
        if name != "old":
            fields[f"logp_{name}_all"] = np.where(mask[..., None], every, junk)
        fields[f"logp_{name}"] = np.where(mask, drawn, junk)
    advantage = draw(arrays(float, (shape[0], 1), elements=st.floats(-1, 3, allow_subnormal=False)))
    return Batch(mask=mask, advantage=advantage, **fields)


def random_logits(rng: np.random.Generator, problem: Problem, sd: float = 1.0) -> np.ndarray:
    """Independent normal logits of standard deviation `sd`; sd = 0 is the uniform policy. (S, V)"""
    return sd * rng.normal(size=problem.shape)
