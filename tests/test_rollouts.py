"""Rows are refused with a reason, or read whole; what is legitimate is not flagged."""

import math

import numpy as np
import pytest

from sandbox.rollouts import MISSING, collect


def row(q, train, **more):
    return {"logp_rollout": q, "logp_train": train, **more}


@pytest.mark.parametrize(
    ("one", "code"),
    [
        (row([-0.1, -0.2, -0.3], [-0.1, -0.2]), "lengths_differ"),
        (row([-0.1] * 3, [-0.1] * 3, token_ids=[1, 2, 3, 4]), "lengths_differ"),  # P07
        (row([-0.1, -math.inf], [-0.1, -0.2]), "nonfinite"),  # P13 b
        (row([math.nan] * 3, [-0.1] * 3), "nonfinite"),  # P12, row B
        (row([-0.1, -0.2], [0.03, -0.2]), "positive_logprob"),  # P13 c
        (row([-0.1], [-0.1], version_rollout=6, version_train=5), "negative_lag"),  # P42
        (row([-0.1], [-0.1], mask=[0]), "empty"),
        (row(["a"], [-0.1]), "malformed"),
        (row(3.0, [-0.1]), "malformed"),
        ({"logp_rollout": [-0.1]}, "mixed_schema"),
        (row([-0.1], [-0.1], token_ids=[1], trainer_token_ids=[2]), "ids_differ"),
        (row([-0.1], [-0.1], reward={"a": 1}), "malformed"),
    ],
)
def test_refused_rows_are_counted_and_the_rest_is_kept(one, code):
    got = collect([one, row([-0.5, -1.0], [-0.6, -0.9])])
    assert [r.code for r in got.refused] == [code]
    assert got.n == 1
    np.testing.assert_array_equal(got.logp_train, [-0.6, -0.9])


@pytest.mark.parametrize(
    ("one", "code", "kept"),
    [
        (row([-0.2, -0.3, 0.0], [-0.2, -0.3, -4.60517]), "placeholder", [1, 1, 0]),  # P09
        (row([-0.5, 0, 0, -0.7], [-0.5, -4, -6, -0.7]), "observation_tokens", [1, 0, 0, 1]),  # P10, unmasked
        (row([-0.4, -9999, -0.6], [-0.4, -0.5, -0.6]), "placeholder", [1, 0, 1]),  # P11
        (row([-0.4, None, -0.6], [-0.4, -0.5, -0.6]), "placeholder", [1, 0, 1]),  # P12, row A
        (row([-0.4, 1, -0.6], [-0.4, -0.5, -0.6]), "placeholder", [1, 0, 1]),  # P10, Flash-RL
    ],
)
def test_placeholders_are_dropped_token_by_token(one, code, kept):
    got = collect([one])
    assert [(r.code, r.tokens) for r in got.refused] == [(code, kept.count(0))]
    np.testing.assert_array_equal(got.mask, np.array(kept, bool))
    t = (got.logp_train - got.logp_rollout)[got.mask]
    np.testing.assert_allclose(t, 0.0, atol=1e-12)


@pytest.mark.parametrize(
    "one",
    [
        row([0.0, -0.3], [-1e-6, -0.3]),  # a genuine 0.0 (P09)
        row([-0.7, -0.3], [-math.inf, -0.3]),  # the trainer rules the token out: weight 0 (P13 a)
        row([-0.5, 0, 0, -0.7], [-0.5, -4, -6, -0.7], mask=[1, 0, 0, 1]),  # P10, masked
        row([-0.5, 0.0], [-0.5, -1.2], temperature=0.0),  # greedy: P03
        row([-0.5, math.nan], [-0.5, -1.2], mask=[True, False]),
        row([-0.1], [-0.1], version_rollout=5, version_train=5),
    ],
)
def test_what_is_legitimate_is_not_flagged(one):
    got = collect([one])
    assert not got.refused
    assert got.n == 1


def test_differing_ids_keep_the_common_prefix():  # P06
    one = row([-0.1, -0.2, -0.3], [-0.1, -4.0, -0.3], token_ids=[11, 22, 33], trainer_token_ids=[11, 55, 33])
    got = collect([one])
    assert [(r.code, r.tokens) for r in got.refused] == [("ids_differ", 2)]
    np.testing.assert_array_equal(got.logp_train, [-0.1])


def test_duplicates_and_missing_versions():
    one = row([-0.1] * 3, [-0.1] * 3, sample_id=4, step=1, version_rollout=[5, None, 6], version_train=6)
    got = collect([one, one, one | {"step": 2}, one | {"step": 3, "version_rollout": -1}])
    assert [r.code for r in got.refused] == ["duplicate"]
    assert got.n == 3
    lag = 6 - got.version_rollout[:3]
    assert np.nanmean(lag) == 0.5  # P42: over the two that are known
    assert np.isnan(got.version_rollout[-3:]).all()  # never lag 0


def test_weights_used_as_a_mask_are_noted():
    got = collect([row([-0.1, -0.2], [-0.1, -0.2], mask=[0.25, 0.0]), row([-0.1], [-0.1], mask=[1.0])])
    assert got.notes["weights_as_mask"] == 1
    assert got.mask.tolist() == [True, False, True]
    assert MISSING < -1000
