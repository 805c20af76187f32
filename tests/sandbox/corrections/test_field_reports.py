"""Entries A4 to A7 of what practitioners report: each printed input with its right value, beside the general property.

P14-P18 sequence products, P19-P28 metrics, P29-P36 masks and denominators, P37-P39 which policy is "old".
"""

import dataclasses
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from sandbox.batch import Batch, unpack
from sandbox.corrections import (
    PRESETS,
    Compose,
    Divergence,
    Mask,
    OffPolicySequenceMask,
    PPOClip,
    Truncate,
    Veto,
    losses,
    presets,
)
from sandbox.errors import BadInput
from sandbox.metrics import estimators, report, summary
from tests.support.strategies import batches


def of_ratios(weights, advantage=1.0, mask=None, q: float = -5.0) -> Batch:
    """Rows of token ratios pi/q (log ratios are finite, weights may be 0)."""
    with np.errstate(divide="ignore"):
        return of_log_ratios(np.log(np.asarray(weights, float)), advantage, mask, q)


def of_log_ratios(d, advantage=1.0, mask=None, q: float = -5.0) -> Batch:
    d = np.atleast_2d(np.asarray(d, float))
    rollout = np.full(d.shape, q)
    mask = np.ones(d.shape, bool) if mask is None else np.atleast_2d(np.asarray(mask)) > 0
    return Batch(rollout + d, rollout, mask, np.broadcast_to(np.asarray(advantage, float), (len(d), 1)))


def ragged(rows: list[list[float]]) -> Batch:
    """Log ratios of responses of unequal length; nan beyond."""
    width = max(map(len, rows))
    table = np.array([row + [np.nan] * (width - len(row)) for row in rows])
    return of_log_ratios(table, mask=~np.isnan(table))


# P14: the product and the geometric mean are two objects; both are printed, never under one name.


@pytest.mark.parametrize(
    ("d", "n", "product", "geometric"), [(0.002, 1000, 7.389, 1.0020), (0.012, 100, 3.320, 1.0121)]
)
def test_p14_product_and_geometric_mean(d: float, n: int, product: float, geometric: float):
    batch = of_log_ratios([d] * n)
    assert PRESETS["seq_is"](batch).weight.item() == pytest.approx(product, abs=1e-3)
    assert Truncate("geometric", math.inf)(batch).weight.item() == pytest.approx(geometric, abs=1e-4)
    assert (PRESETS["trl.sequence_mask"](batch).weight == 0).all()  # cap 3 masks both


@given(batch=batches())
def test_p14_the_product_is_the_geometric_mean_to_the_length(batch: Batch):
    length = batch.mask.sum(-1, keepdims=True)
    geometric = Truncate("geometric", math.inf)(batch).weight
    np.testing.assert_allclose(PRESETS["seq_is"](batch).weight, geometric**length, rtol=1e-9)


# P15: independent token log ratios of standard deviation s: sequence ESS e^{-T s^2}.


def test_p15_sequence_ess_falls_with_length():
    for s, length in ((0.02, 4000), (0.05, 1000)):
        d = s * math.sqrt(length) * np.random.default_rng(0).normal(size=400_000)  # sums of T tokens
        assert estimators.ess(d) == pytest.approx(math.exp(-length * s**2), rel=0.2)


# P16: overflow and clamps. Scale invariance is the general property.


def test_p16_no_clamp_and_no_overflow():
    assert estimators.ess(np.array([200.0, 199.0])) * 2 == pytest.approx(1.648, abs=1e-3)
    told = report(of_log_ratios([[200.0], [199.0]]))
    assert told.ess["sequence"].raw == pytest.approx(0.824, abs=1e-3)
    assert report(of_log_ratios([[2000.0], [1999.0]], q=-9000)).ess["sequence"].raw == pytest.approx(0.824, abs=1e-3)


@given(arrays(float, st.integers(1, 30), elements=st.floats(-20, 20)), st.floats(-700, 700))
def test_p16_sequence_ess_is_scale_invariant(log_weight: np.ndarray, shift: float):
    with np.errstate(all="ignore"):
        a, b = (report(of_log_ratios(x[:, None], q=-1500)).ess["sequence"] for x in (log_weight, log_weight + shift))
    assert a.raw == pytest.approx(b.raw, rel=1e-9)
    assert (a.low, a.high) == pytest.approx((b.low, b.high), rel=1e-9)
    assert 1 / len(log_weight) - 1e-12 <= a.raw <= 1 + 1e-12


# P17: exponential of the sum, not sum of exponentials; padding adds nothing.


def test_p17_exponential_of_the_sum():
    batch = of_log_ratios([0.1, -0.1, 0.0, 0.0, 0.0], mask=[1, 1, 1, 0, 0])
    assert PRESETS["seq_is"](batch).weight.item() == pytest.approx(1.0)


# P18: a geometric mean cancels what no token-level number may hide.


def test_p18_a_cancelling_geometric_mean_is_flagged_by_the_tails():
    batch = of_log_ratios([2.0, -2.0, 2.0, -2.0])
    assert Truncate("geometric", math.inf)(batch).weight.item() == 1.0
    tails = report(batch).tails
    assert tails.multiplicative == pytest.approx(7.389, abs=1e-3)
    assert (tails.smallest_ratio, tails.largest_ratio) == pytest.approx((0.135, 7.389), abs=1e-3)
    assert not Divergence("multiplicative", "mean", 1.5)(batch).keep.any()
    assert Mask("geometric", 0.99, 1.01, weigh=False)(batch).keep.all()


@given(batch=batches())
def test_p18_extremes_are_those_of_the_tokens(batch: Batch):
    t = [float(batch.logp_train[i] - batch.logp_rollout[i]) for i in zip(*np.nonzero(batch.mask), strict=True)]
    tails = report(batch).tails
    if t:
        assert tails.multiplicative == pytest.approx(np.mean([math.exp(abs(x)) for x in t]))
        assert tails.smallest_ratio == pytest.approx(math.exp(min(t)))
        assert tails.largest_ratio == pytest.approx(math.exp(max(t)))


# P19: raw and truncated, never one number; the alarm is of the raw one.


def test_p19_raw_beside_truncated():
    batch = of_ratios([[1.0], [1.0], [1.0], [97.0]])
    told = report(batch, PRESETS["tis"](batch))
    assert told.ess["sequence"].raw * 4 == pytest.approx(1.0625, abs=1e-4)
    assert told.applied is not None
    assert told.applied.ess * 4 == pytest.approx(3.571, abs=1e-3)
    assert float(presets.verl_metrics(batch)["rollout_is_ratio_fraction_high"]) == 0.25
    assert any("sequence ESS is 0.266" in alarm for alarm in told.alarms)


@given(batch=batches())
@settings(max_examples=60)
def test_p19_the_raw_numbers_do_not_know_the_correction(batch: Batch):
    plain = report(batch)
    for name in ("tis", "seq_mis", "icepop", "snis"):
        other = report(batch, PRESETS[name](batch))
        for unit, ess in plain.ess.items():
            np.testing.assert_equal(dataclasses.astuple(other.ess[unit]), dataclasses.astuple(ess))


# P20, P21, P22: units. A sequence counts once, whatever its length; fractions lie in [1/n, 1].


def test_p20_sequence_ess_counts_responses():
    batch = ragged([[0.0], [math.log(2) / 9] * 9])
    ess = report(batch).ess
    assert ess["sequence"].raw == pytest.approx(0.9)
    assert (ess["sequence"].unit, ess["sequence"].n, ess["token"].unit, ess["token"].n) == ("sequence", 2, "token", 10)


def test_p21_equal_weights_are_one_whatever_the_segments():
    segment = np.array([[0, 0, 1, 1], [2, 2, 2, 2], [0, 1, 1, 1]])
    packed = of_log_ratios(np.zeros((3, 4)))
    assert report(packed).ess["sequence"].raw == pytest.approx(1.0)
    told = report(unpack(packed, segment))
    assert (told.ess["sequence"].raw, told.ess["sequence"].n) == (pytest.approx(1.0), 5)


def test_p22_sequence_weights_do_not_broadcast_into_a_matrix():
    batch = of_ratios([[2.0], [4.0]])
    applied = report(batch, PRESETS["seq_is"](batch)).applied
    assert applied is not None
    assert applied.mean == pytest.approx(3.0)
    corrected = PRESETS["seq_is"](batch)
    assert losses.reinforce(batch, corrected, 1.0) == pytest.approx(6 * 5 - 2 * math.log(2) - 4 * math.log(4))


# P23: global, never a mean of means. Ranks and micro-batches of any sizes.


def test_p23_global_against_per_rank():
    batch = ragged([[-0.1], [-0.01] * 9])
    told = report(batch)
    assert told.kl_sampler_train["k1"] == pytest.approx(0.019)
    assert told.kl_sampler_train_by_response["k1"] == pytest.approx(0.055)
    # sums 2 of 8 tokens and 3 of 4 tokens, k1 = -d
    ranks = [of_log_ratios([-0.25] * 8), of_log_ratios([-0.75] * 4)]
    merged = report(summary.merge([summary.summarise(rank) for rank in ranks]))
    assert merged.kl_sampler_train["k1"] == pytest.approx(5 / 12)


@given(batch=batches(), cut=st.integers(0, 4))
@settings(max_examples=60)
def test_p23_merged_summaries_are_the_global_batchs(batch: Batch, cut: int):
    corrected = PRESETS["icepop"](batch)
    parts = [slice(0, cut), slice(cut, None)]
    pieces = [
        summary.summarise(batch.rows(p), corrected._replace(weight=corrected.weight[p], keep=corrected.keep[p]))
        for p in parts
        if len(batch.mask[p])
    ]
    merged, whole = report(summary.merge(pieces)), report(batch, corrected)
    assert_close(dataclasses.asdict(merged), dataclasses.asdict(whole))


def assert_close(a, b, where: str = "") -> None:
    """Nested equality, floats to 1e-9, nan equal to nan."""
    if isinstance(b, dict):
        assert a.keys() == b.keys(), where
        for key in b:
            assert_close(a[key], b[key], f"{where}.{key}")
    elif isinstance(b, tuple | list):
        assert len(a) == len(b), where
        for i, (x, y) in enumerate(zip(a, b, strict=True)):
            assert_close(x, y, f"{where}[{i}]")
    elif isinstance(b, float):
        assert a == pytest.approx(b, rel=1e-9, abs=1e-12, nan_ok=True), where
    else:
        assert a == b, where


def test_p23_gradient_accumulation_divides_once():
    batch = of_ratios(np.ones((2, 6)), mask=[[1, 1, 0, 0, 0, 0], [1] * 6], q=-1.0)
    loss = dataclasses.replace(batch, advantage=np.array([[2.0], [1 / 3]]))
    micro = [
        losses.reinforce(loss.rows(slice(i, i + 1)), PRESETS["none"](loss.rows(slice(i, i + 1))), 8) for i in (0, 1)
    ]
    assert sum(micro) == pytest.approx(
        0.75
    )  # sums 4 of 2 tokens, 2 of 6; per micro-batch it would be 1.1667 twice halved


# P25: a small sample flatters ESS; a number never comes without n, interval and k.


def test_p25_small_samples_flatter():
    """log w ~ N(0, 1.5^2), true fraction .1054: means over repetitions, 5 standard errors."""
    rng = np.random.default_rng(0)
    for n, expected, reps in ((64, 0.23, 2000), (256, 0.17, 1000), (8192, 0.116, 60)):
        values = estimators.ess(1.5 * rng.normal(size=(reps, n)))
        assert abs(values.mean() - expected) < 0.006 + 5 * values.std() / math.sqrt(reps)
    told = report(of_log_ratios(1.5 * rng.normal(size=(64, 1))))
    ess = told.ess["sequence"]
    assert ess.n == 64
    assert ess.low < ess.raw < ess.high
    assert math.isfinite(ess.pareto_k)
    assert ess.pareto_k_limit == pytest.approx(1 - 1 / math.log10(64))


# P27, P28: means over the kept, direction in the name.


def test_p27_the_mean_weight_is_of_the_kept():
    batch = of_ratios(np.ones((1, 10)))
    corrected = PRESETS["none"](batch)._replace(keep=np.arange(10)[None] >= 3)
    applied = report(batch, corrected).applied
    assert applied is not None
    assert (applied.mean, applied.rejected_fraction) == (1.0, pytest.approx(0.3))
    assert float(presets.areal_metrics(batch, corrected)["behave_imp_weight"]) == 1.0


def test_p28_kl_estimators_and_their_direction():
    kl = report(of_log_ratios([0.1, -0.2, 0.05])).kl_sampler_train
    assert (kl["k1"], kl["k2"], kl["k3"]) == pytest.approx((0.016667, 0.008750, 0.008391), abs=1e-6)
    assert 3 * kl["k3"] == pytest.approx(0.025173, abs=1e-6)
    reverse = presets.ratios.ESTIMATORS["k3_reversed"](np.array([0.1, -0.2, 0.05]))
    assert reverse.mean() == pytest.approx(0.009157, abs=1e-6)


@given(batch=batches())
def test_p28_k3_is_never_negative_and_k1_has_the_sign_of_q_over_pi(batch: Batch):
    kl = report(batch).kl_sampler_train
    assert not kl["k3"] < 0
    swapped = dataclasses.replace(batch, logp_train=batch.logp_rollout, logp_rollout=batch.logp_train)
    assert report(swapped).kl_sampler_train["k1"] == pytest.approx(-kl["k1"], abs=1e-12, nan_ok=True)


# P29, P30, P31, P32: masks and denominators.


def test_p29_both_denominators():
    batch = of_log_ratios([0.0, -2.0, 0.9, -8.0, 0.2], q=-100.0)
    corrected = Mask("token", 0.5, 2.0)(batch)
    assert corrected.keep.tolist() == [[True, False, False, False, True]]
    weighted = float((corrected.weight * corrected.keep).sum())
    account = losses.accounts(batch, corrected)
    assert (account["tokens"], account["tokens_kept"]) == (5, 2)
    assert weighted / 5 == pytest.approx(0.4443, abs=1e-4)
    assert weighted / 2 == pytest.approx(1.1107, abs=1e-4)
    assert account["loss_kept"] / account["loss_fixed"] == pytest.approx(2.5)


def test_p30_masked_values_are_not_in_the_numerator_and_have_no_gradient():
    """A loss of [[1, 7], [3, -5]] under the mask [[1, 0], [1, 0]] is 2; and nan there gives gradient 0."""
    p = torch.tensor([[-1.0, math.nan], [-1.0, math.nan]], requires_grad=True)
    mask = torch.tensor([[True, False], [True, False]])
    batch = Batch(p, p.detach(), mask, torch.tensor([[1.0, 7.0], [3.0, -5.0]]))
    loss = losses.reinforce(batch, PRESETS["none"](batch))
    loss.backward()
    assert loss.item() == 2.0
    assert p.grad.tolist() == [[-0.5, 0.0], [-1.5, 0.0]]


def test_p31_an_empty_response_adds_no_token():
    batch = of_ratios(np.ones((2, 4)), mask=[[1, 1, 1, 1], [0, 0, 0, 0]], q=-1.0)
    for denominator in ("fixed", "kept"):
        assert losses.reinforce(batch, PRESETS["none"](batch), denominator) == 1.0
    told = report(batch)
    assert (told.n_responses, told.n_tokens, told.ess["sequence"].n) == (1, 4, 1)


def test_p32_everything_rejected_is_an_alarm_not_a_crash():
    batch = of_log_ratios([[0.5] * 4, [-0.7] * 4])
    rule = Compose((Mask("geometric", 0.99, 1.001, weigh=False), Veto(1e-4)))
    corrected = rule(batch)
    told = report(batch, corrected)
    assert losses.reinforce(batch, corrected, "kept") == 0.0
    assert told.applied is not None
    assert math.isnan(told.applied.ess)
    assert told.applied.rejected_fraction == 1.0
    assert "every token is rejected: rejected_fraction 1" in told.alarms
    assert losses.accounts(batch, corrected)["alarm"] == "every token is rejected"


@given(batch=batches(), data=st.data())
@settings(max_examples=60)
def test_p30_numbers_of_a_report_do_not_see_masked_places(batch: Batch, data):
    junk = data.draw(st.sampled_from([0.0, 1.0, -9999.0, np.nan, -np.inf]))
    names = ("logp_train", "logp_rollout", "logp_sync")
    filled = dataclasses.replace(batch, **{n: np.where(batch.mask, getattr(batch, n), junk) for n in names})
    left = {n: np.pad(getattr(filled, n), ((0, 0), (2, 0)), constant_values=junk) for n in names}
    moved = Batch(mask=np.pad(batch.mask, ((0, 0), (2, 0))), advantage=batch.advantage, **left)
    expected = dataclasses.asdict(report(batch))
    for other in (filled, moved):
        found = dataclasses.asdict(report(other))
        for profile in (found["by_position"], expected["by_position"]):  # wider batches have more, empty, bins
            filled_bins = [i for i, n in enumerate(profile["n"]) if n]
            profile.update({k: tuple(v[i] for i in filled_bins) for k, v in profile.items()})
        assert_close(found, expected)


# P33, P34, P36: sides and edges.


def test_p33_bounds_are_on_trainer_over_sampler():
    batch = of_ratios([0.65, 1.0, 1.5, 0.71], q=-5.0)
    assert Mask("token", 0.6, 1.4)(batch).keep.tolist() == [[True, True, False, True]]
    assert presets.verl_k1("token", 0.6, 1.4, "total")(batch).keep.tolist() == [[False, True, True, False]]


def test_p34_opsm_is_a_test_of_the_whole_response():
    batch = dataclasses.replace(of_log_ratios([-0.8] * 3), advantage=np.array([[-0.6, 0.3, -0.3]]))
    assert not OffPolicySequenceMask(0.1)(batch).keep.any()
    two = Batch(
        *(np.repeat(x, 2, 0) for x in (batch.logp_train, batch.logp_rollout, batch.mask)), np.array([[-1.0], [1.0]])
    )
    assert OffPolicySequenceMask(0.1)(two).keep.tolist() == [[False] * 3, [True] * 3]
    assert OffPolicySequenceMask(0.81)(two).keep.all()


@given(batch=batches(), data=st.data())
def test_p34_sequence_rules_never_split_a_response(batch: Batch, data):
    advantage = data.draw(arrays(float, batch.mask.shape, elements=st.floats(-2, 2)))
    batch = dataclasses.replace(batch, advantage=advantage)
    rules = [
        Mask("sequence", 0.5, 2.0, weigh=False),
        Mask("geometric", 0.9, 1.1, weigh=False),
        Veto(0.5, 2.0),
        OffPolicySequenceMask(0.05),
    ]
    for rule in [*rules, Divergence("k3", "sum", 0.1), Divergence("k2", "max", 0.1), Mask("sequence")]:
        keep = rule(batch).keep
        whole = keep.any(-1, keepdims=True)
        np.testing.assert_array_equal(keep, batch.mask & whole)


def test_p36_names_and_inclusive_edges():
    batch = of_ratios([0.15, 0.6, 1.0, 3.0, 8.0], q=-5.0)
    expected = {
        "tis": ([0.15, 0.6, 1, 2, 2], 5.75, 0.705),
        "mis": ([0.15, 0.6, 1, 0, 0], 1.75, 0.443),
        "icepop": ([0, 0.6, 1, 3, 0], 4.6, 0.408),
    }
    for name, (weights, total, fraction) in expected.items():
        corrected = PRESETS[name](batch)
        weight = np.where(corrected.keep, corrected.weight, 0.0)
        np.testing.assert_allclose(weight[0], weights, rtol=1e-12)
        assert weight.sum() == pytest.approx(total)
        applied = report(batch, corrected).applied
        assert applied is not None
        assert applied.ess == pytest.approx(fraction, abs=1e-3)
    assert report(batch).ess["token"].raw == pytest.approx(0.437, abs=1e-3)
    edge = Batch(
        np.array([[0.0, -math.log(2)]]), np.array([[-math.log(5), 0.0]]), np.ones((1, 2), bool), np.ones((1, 1))
    )
    assert Mask("token", 0.5, 5.0)(edge).keep.all()  # 5 and 1/2 themselves


# P37, P38, P39: which policy is "old", double counting, detached weights.


def test_p37_without_mu_nothing_is_called_numerics():
    batch = Batch(np.array([[-0.7]]), np.array([[-1.0]]), np.ones((1, 1), bool), np.ones((1, 1)),
                  logp_old=np.array([[-0.7]]), version_rollout=np.array([[5]]), version_train=8)  # fmt: skip
    told = report(batch)
    assert told.decomposition is None
    assert set(told.ess) == {"sequence", "token"}
    with pytest.raises(BadInput, match="no logp_sync"):
        Truncate(on="discrepancy")(batch)
    assert batch.log_ratio("behaviour").item() == pytest.approx(0.3)  # old/q: not a discrepancy


def test_p38_bypass_does_not_count_twice():
    q, n = np.log([[1.0 - 1e-12]]), np.log([[1.5]]) - 1.0
    bypass = Batch(n, q - 1.0, np.ones((1, 1), bool), np.ones((1, 1)), logp_old=q - 1.0)
    decoupled = Compose((Truncate("token", math.inf, "behaviour"), PPOClip(9.0, 9.0, on="drift")))
    assert decoupled(bypass).weight.item() == pytest.approx(1.5)


@given(batch=batches())
def test_p38_weights_of_the_parts_multiply_to_the_whole(batch: Batch):
    whole = Truncate("token", math.inf)(batch).weight
    for parts in (("discrepancy", "lag"), ("behaviour", "drift")):
        product = Compose(tuple(Truncate("token", math.inf, on) for on in parts))(batch).weight
        np.testing.assert_allclose(product, whole, rtol=1e-12)


def test_p39_the_weight_carries_no_gradient():
    logits = torch.tensor([math.log(0.6 / 0.4), 0.0], requires_grad=True)
    logp = logits.log_softmax(-1)[:1][None]
    batch = Batch(logp, torch.tensor([[math.log(0.5)]]), torch.ones(1, 1, dtype=torch.bool), torch.ones(1, 1))
    for name in ("tis", "seq_is"):
        loss = losses.reinforce(batch, PRESETS[name](batch))
        assert torch.autograd.grad(loss, logits, retain_graph=True)[0][0].item() == pytest.approx(-0.48)
