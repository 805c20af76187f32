"""ESS, its error, KL estimators and the decomposition: published examples, slow formulas, properties."""

import dataclasses
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from sandbox import diagnostics
from sandbox.batch import Batch
from sandbox.errors import BadInput
from tests.strategies import batches

log_weights = arrays(float, st.integers(1, 40), elements=st.floats(-30, 30))


@pytest.mark.parametrize(
    ("weights", "fraction"),
    [
        ([1, 1, 1, 97], 10000 / (4 * 9412)),  # raw; truncated at 2 it would read .893
        ([1, 1, 0, 1], 0.75),  # a weight of 0 stays in n
        ([1, 2], 0.9),
        ([0, 0, 5], 1 / 3),  # one live weight
    ],
)
def test_ess_of_known_weights(weights: list[float], fraction: float):
    log_weight = np.array([math.log(w) if w else -math.inf for w in weights])
    assert diagnostics.ess(log_weight) == pytest.approx(fraction, rel=1e-12)


def test_ess_in_log_space_does_not_overflow():
    assert diagnostics.ess(np.array([200.0, 199.0])) == pytest.approx((1 + math.exp(-1)) ** 2 / (1 + math.exp(-2)) / 2)
    assert diagnostics.ess(np.array([-5000.0, -5000.0])) == pytest.approx(1.0, rel=1e-12)


def test_ess_is_undefined_without_weight():
    assert math.isnan(diagnostics.ess(np.array([-math.inf, -math.inf])))
    assert math.isnan(diagnostics.ess(np.zeros(0)))


@given(log_weights, st.floats(-50, 50), st.randoms(use_true_random=False))
def test_ess_is_invariant_and_bounded(log_weight: np.ndarray, shift: float, random):
    value = diagnostics.ess(log_weight)
    w = [math.exp(x) for x in log_weight]
    assert value == pytest.approx(sum(w) ** 2 / sum(x * x for x in w) / len(w), rel=1e-9)
    assert 1 / len(w) - 1e-12 <= value <= 1 + 1e-12
    assert diagnostics.ess(log_weight + shift) == pytest.approx(value, rel=1e-9)
    shuffled = log_weight.copy()
    random.shuffle(shuffled)
    assert diagnostics.ess(shuffled) == pytest.approx(value, rel=1e-12)
    assert diagnostics.ess(torch.tensor(log_weight)).item() == pytest.approx(value, rel=1e-12)
    assert diagnostics.renyi2(log_weight) == pytest.approx(-math.log(value), abs=1e-9)


def test_ess_along_leading_axes():
    log_weight = np.log(np.array([[1, 2, 4], [1, 1, 7]], dtype=float))
    np.testing.assert_allclose(diagnostics.ess(log_weight), [49 / 21 / 3, 81 / 51 / 3])


def test_standard_error_against_a_bootstrap_over_prompts():
    """400 prompts of 3 responses sharing a common part. The bootstrap's own error is 1.6 %; 5 sigma: 8 %."""
    rng = np.random.default_rng(0)
    prompts, group = 400, np.repeat(np.arange(400), 3)
    log_weight = 0.5 * rng.normal(size=prompts)[group] + 0.2 * rng.normal(size=1200) + 0.3
    by_prompt = log_weight.reshape(prompts, 3)
    resampled = [float(diagnostics.ess(by_prompt[rng.integers(prompts, size=prompts)].ravel())) for _ in range(2000)]
    error = diagnostics.ess_standard_error(log_weight, group)
    assert error == pytest.approx(np.std(resampled), rel=0.08)
    # taken for independent, the same responses look more certain than they are
    assert diagnostics.ess_standard_error(log_weight, np.arange(1200)) < 0.8 * error


def test_kl_estimators_of_a_printed_example():
    """t = [.1, -.2, .05] under q: k1 .016667, k2 .008750, k3 .008391; the reverse direction's k3 would be .009157."""
    q = np.array([[-1.0, -2.0, -0.7, 0.0]])
    t = np.array([[0.1, -0.2, 0.05, 9.0]])
    batch = Batch(q + t, q, np.array([[True, True, True, False]]), np.ones((1, 1)))
    kl = diagnostics.kl_sampler_train(batch)
    assert kl["k1"] == pytest.approx(0.0166667, abs=1e-6)
    assert kl["k2"] == pytest.approx(0.00875, abs=1e-6)
    assert kl["k3"] == pytest.approx(0.008391, abs=1e-6)


@given(batches())
def test_the_token_error_splits_exactly(batch: Batch):
    split = diagnostics.decompose(batch)
    assert split.total == pytest.approx(split.discrepancy + split.lag + split.cross_term, abs=1e-12)
    tokens = list(zip(*np.nonzero(batch.mask), strict=True))
    d = [batch.logp_sync[i] - batch.logp_rollout[i] for i in tokens]  # type: ignore[index]
    g = [batch.logp_train[i] - batch.logp_sync[i] for i in tokens]  # type: ignore[index]
    n = max(len(tokens), 1)
    assert split.discrepancy == pytest.approx(sum(x * x for x in d) / n)
    assert split.lag == pytest.approx(sum(x * x for x in g) / n)
    assert split.cross_term == pytest.approx(2 * sum(x * y for x, y in zip(d, g, strict=True)) / n, abs=1e-12)
    if d and split.discrepancy + split.lag > 0:
        assert split.lag_share == pytest.approx(split.lag / (split.lag + split.discrepancy))
    for source, per_token in (("lag", g), ("discrepancy", d)):
        total = float(diagnostics.sequence_log_weight(batch, source).sum())
        assert total == pytest.approx(sum(per_token), abs=1e-9)


def test_without_the_trainer_at_the_samplers_weights_nothing_is_split():
    batch = Batch(np.zeros((1, 1)), np.zeros((1, 1)), np.ones((1, 1), bool), np.ones((1, 1)))
    with pytest.raises(BadInput, match="no logp_sync"):
        diagnostics.decompose(batch)
    assert math.isnan(diagnostics.decompose(dataclasses.replace(batch, logp_sync=np.zeros((1, 1)))).lag_share)


def test_unknown_source():
    batch = Batch(np.zeros((1, 1)), np.zeros((1, 1)), np.ones((1, 1), bool), np.ones((1, 1)))
    with pytest.raises(BadInput, match="source is 'old'"):
        diagnostics.sequence_log_weight(batch, "old")
