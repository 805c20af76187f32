"""The constant discrepancy and the resync rules."""

import math

import numpy as np
import pytest
from numpy.testing import assert_allclose

from sandbox.corrections import RESYNCS, EssBelow, EveryK, KlAbove, Never
from sandbox.errors import BadInput
from sandbox.tabular.policy import ConstantOffset, log_policy, policies


def test_an_exact_sampler_has_discrepancy_zero_to_the_last_bit():
    logits = np.random.default_rng(0).normal(size=(50, 7))
    three = policies(logits + 1.0, logits, ConstantOffset(0.0)(np.random.default_rng(1), (50, 7)))
    assert np.array_equal(three.sync, three.rollout)
    assert np.array_equal(three.sync, log_policy(logits))


def test_discrepancy_is_minus_the_offset_up_to_a_constant_per_state():
    rng = np.random.default_rng(0)
    logits, offset = rng.normal(size=(5, 4)), rng.normal(0.3, 1, size=(5, 4))
    three = policies(rng.normal(size=(5, 4)), logits, offset)
    d_plus_offset = three.sync - three.rollout + offset
    assert_allclose(d_plus_offset, np.repeat(d_plus_offset[:, :1], 4, axis=1), atol=1e-12)
    for table in three:
        assert_allclose(np.exp(table).sum(axis=-1), 1.0)


def test_offset_has_the_given_standard_deviation():
    """100,000 normals: 5 standard errors of a standard deviation are 1.1 %; false alarm 6e-7, seed fixed."""
    offset = ConstantOffset(0.3)(np.random.default_rng(0), (1000, 100))
    assert abs(offset.std() / 0.3 - 1) < 0.012
    assert abs(offset.mean()) < 5 * 0.3 / math.sqrt(1e5)


@pytest.mark.parametrize(
    ("rule", "steps", "ess", "error", "expected"),
    [
        (Never(), 1000, 0.0, 0.0, False),
        (EveryK(1), 1, 1.0, 0.0, True),
        (EveryK(3), 2, 0.0, 0.0, False),
        (EveryK(3), 3, 1.0, 0.0, True),
        (EveryK(3), 4, 1.0, 0.0, True),
        (EssBelow(), 1, 0.5, 0.2, False),
        (EssBelow(), 1, 0.499, 0.2, True),
        (EssBelow(0.8), 1, 0.7, 0.0, True),
        (EssBelow(0.3), 1, 0.4, 0.0, False),
        (EssBelow(z=1.645), 1, 0.57, 0.05, True),  # lower limit .488
        (EssBelow(z=1.645), 1, 0.59, 0.05, False),  # lower limit .508
        (EssBelow(z=-1.645), 1, 0.45, 0.05, False),
        (EssBelow(), 1, math.nan, 0.0, True),
        (EssBelow(z=1.645), 1, 0.9, math.nan, True),
    ],
)
def test_rules(rule, steps, ess, error, expected):
    assert rule(steps, ess, error) is expected


def test_presets():
    assert RESYNCS["never"] == Never()
    assert RESYNCS["every"] == EveryK(1)
    assert RESYNCS["ess_below"] == EssBelow(0.5, 0.0)
    assert RESYNCS["ess_lower"] == EssBelow(0.5, 1.645)


@pytest.mark.parametrize(
    "make",
    [
        lambda: EveryK(0),
        lambda: EssBelow(0.0),
        lambda: EssBelow(1.5),
        lambda: EssBelow(math.nan),
        lambda: ConstantOffset(-1.0),
        lambda: ConstantOffset(math.nan),
    ],
)
def test_impossible_rules_are_refused(make):
    with pytest.raises(BadInput):
        make()


def test_kl_above_watches_the_token_kl_and_nothing_else():
    rule = KlAbove(0.01)
    assert [rule(1, 0.1, 0.0, kl) for kl in (0.0, 0.01, 0.0101, math.inf, math.nan)] == [False, False, True, True, True]
    with pytest.raises(BadInput, match="needs the KL a token"):
        rule(1, 0.1, 0.0)
    for bad in (0.0, -1.0, math.inf, math.nan):
        with pytest.raises(BadInput, match="threshold is"):
            KlAbove(bad)
