"""Contract, values and gradients of every preset: slow scalar loops, numpy against torch, invariances.

The properties run over all presets inside one example: drawing a batch costs more than correcting it.
"""

import dataclasses
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sandbox.arrays import log_softmax
from sandbox.batch import Batch
from sandbox.corrections import (
    CIS,
    CORRECTIONS,
    DLC,
    PRESETS,
    RULES,
    Centre,
    Compose,
    Correction,
    Divergence,
    Mask,
    PPOClip,
    TimesEss,
    Truncate,
    Veto,
    in_chunks,
    losses,
    ratios,
)
from sandbox.errors import BadInput
from tests.support import reference
from tests.support.strategies import batches

every_correction = pytest.mark.parametrize("name", PRESETS)
MIX = {"snis", "slime.mis"}  # their weights depend on the whole batch


def as_torch(batch: Batch, gradient: bool = False) -> Batch:
    values = {f.name: getattr(batch, f.name) for f in dataclasses.fields(batch)}
    return Batch(
        **{
            name: torch.tensor(value, requires_grad=gradient and name == "logp_train") if value is not None else None
            for name, value in values.items()
        }
    )


def on_policy(batch: Batch) -> Batch:
    fields = {f"logp_{who}": batch.logp_rollout for who in ("train", "sync", "old")}
    return dataclasses.replace(
        batch, **fields, logp_train_all=batch.logp_rollout_all, logp_sync_all=batch.logp_rollout_all
    )


def rows(batch: Batch, index: np.ndarray) -> Batch:
    values = {f.name: getattr(batch, f.name) for f in dataclasses.fields(batch)}
    return Batch(**{name: value[index] if value is not None else None for name, value in values.items()})


@pytest.mark.parametrize("correction", [*PRESETS.values(), *RULES.values()], ids=repr)
def test_a_correction_is_data(correction: Correction):
    assert isinstance(correction, Correction)
    hash(correction)
    assert eval(repr(correction), {type(r).__name__: type(r) for r in RULES.values()} | {"inf": math.inf}) == correction
    with pytest.raises(dataclasses.FrozenInstanceError):
        correction.cap = 3.0


@given(batch=batches())
def test_contract(batch: Batch):
    for correction in PRESETS.values():
        holds_the_contract(correction, batch)


def holds_the_contract(correction: Correction, batch: Batch) -> None:
    before = {
        f.name: np.array(getattr(batch, f.name))
        for f in dataclasses.fields(batch)
        if getattr(batch, f.name) is not None
    }
    weight, keep, centre = correction(batch)
    for field, value in before.items():
        np.testing.assert_array_equal(getattr(batch, field), value, err_msg="the batch was written to")
    shape = batch.logp_train.shape
    assert weight.shape in (shape, (shape[0], 1))
    assert np.isfinite(weight).all()
    assert (weight >= 0).all()
    assert keep.shape == shape
    assert keep.dtype == bool
    assert not (keep & ~batch.mask).any()
    if correction.centres:
        assert centre.shape == batch.logp_train_all.shape
        # a distribution minus a distribution; nothing at masked places
        np.testing.assert_allclose(centre.sum(-1), 0, atol=1e-12)
        assert (centre[~batch.mask] == 0).all()
    else:
        assert centre == 0.0


@given(batch=batches())
def test_without_mismatch_every_correction_is_the_identity(batch: Batch):
    for name, correction in PRESETS.items():
        weight, keep, centre = correction(on_policy(batch))
        np.testing.assert_allclose(weight, 1, rtol=1e-12, err_msg=name)
        np.testing.assert_array_equal(keep, batch.mask)
        np.testing.assert_allclose(centre, 0, atol=1e-12)


@given(batch=batches(), data=st.data())
def test_masked_places_padding_side_order_and_chunks_do_not_matter(batch: Batch, data):
    junk = data.draw(st.sampled_from([0.0, 1.0, 7.5, np.nan, -np.inf]))
    changed = {
        f.name: np.where(
            batch.mask if getattr(batch, f.name).ndim == 2 else batch.mask[..., None], getattr(batch, f.name), junk
        )
        for f in dataclasses.fields(batch)
        if f.name.startswith("logp_") and getattr(batch, f.name) is not None
    }
    filled = dataclasses.replace(batch, **changed)
    order = np.array(data.draw(st.permutations(range(len(batch.mask)))))
    back, columns = np.argsort(order), batch.mask.shape[1]
    more = data.draw(st.integers(1, 3))  # columns of padding, on either side
    padded = {side: widened(batch, side, more, junk) for side in ((more, 0), (0, more))}
    for name, correction in PRESETS.items():
        weight, keep, centre = correction(batch)
        per_token = weight.shape == batch.mask.shape
        counted = batch.mask if per_token else batch.mask.any(-1, keepdims=True)

        def same(other, of=lambda x: x, weight=weight, keep=keep, counted=counted, name=name):
            np.testing.assert_allclose(of(other.weight)[counted], weight[counted], rtol=1e-12, err_msg=name)
            np.testing.assert_array_equal(of(other.keep), keep, err_msg=name)

        again = correction(filled)
        same(again)
        np.testing.assert_array_equal(again.centre, centre)
        same(correction(rows(batch, order)), lambda x: x[back])
        for (left, _), wider in padded.items():
            same(correction(wider), lambda x, left=left: x if x.shape[1] == 1 else x[:, left:][:, :columns])
        if name not in MIX:
            same(in_chunks(correction, batch, tokens=7))


def widened(batch: Batch, side: tuple[int, int], more: int, junk: float) -> Batch:
    """The batch with masked columns before or after, which hold anything."""
    values = {f.name: getattr(batch, f.name) for f in dataclasses.fields(batch)}
    for name, value in values.items():
        if value is not None and value.ndim >= 2 and name != "advantage":
            width = [(0, 0), side, *[(0, 0)] * (value.ndim - 2)]
            values[name] = np.pad(value, width, constant_values=False if name == "mask" else junk)
    return Batch(**values)


@given(batch=batches())
def test_numpy_equals_torch_and_nothing_carries_a_gradient(batch: Batch):
    tensors = as_torch(batch, gradient=True)
    for name, correction in PRESETS.items():
        for a, b in zip(correction(batch), correction(tensors), strict=True):
            if isinstance(b, torch.Tensor):
                assert not b.requires_grad
                np.testing.assert_allclose(b.numpy(), a, rtol=1e-12, atol=1e-12, err_msg=name)
            else:
                assert a == b


SCALAR = ["none", "tis", "mis", "icepop", "ppo", "cis", "dlc", "seq_tis", "seq_mis", "seq_is", "seq_dlc"]
SCALAR += ["ppo_dual", "cispo", "dppo", "dppo_kl", "cis_raised", "geo_tis", "geo_mis", "prefix_tis", "gspo", "opsm"]


@given(batch=batches())
def test_weights_against_scalar_loops(batch: Batch):
    """`reference.weights` reads each response as a chain of one-token states; on a bound rounding decides, so
    entries where the loop itself jumps within 1e-9 are left out."""
    wide = {name: np.broadcast_to(PRESETS[name](batch).weight, batch.mask.shape) for name in SCALAR}
    keep = {name: PRESETS[name](batch).keep for name in SCALAR}
    for b in range(len(batch.mask)):
        places = np.flatnonzero(batch.mask[b])
        pi, mu, q = (x[b, places][:, None] for x in (batch.logp_train, batch.logp_sync, batch.logp_rollout))
        e, a = [(i, 0) for i in range(len(places))], float(batch.advantage[b, 0])
        for name in SCALAR if len(places) else ():
            expected, *near = (reference.weights(name, pi + h, mu, q, e, a) for h in (0.0, 1e-9, -1e-9))
            steady = np.abs(np.array(near) - expected).max(axis=0) < 1e-6 * (1 + np.abs(expected))
            ours = np.where(keep[name][b, places], wide[name][b, places], 0.0)
            np.testing.assert_allclose(ours[steady], np.array(expected)[steady], rtol=1e-9, err_msg=name)


@given(batch=batches())
def test_sequence_weights_are_products(batch: Batch):
    rows_of = zip(batch.logp_train, batch.logp_rollout, batch.mask, strict=True)
    product = [math.prod(np.exp(p[m] - q[m])) for p, q, m in rows_of]
    np.testing.assert_allclose(CORRECTIONS["seq_is"](batch).weight[:, 0], product, rtol=1e-10)
    np.testing.assert_allclose(CORRECTIONS["seq_tis"](batch).weight[:, 0], np.minimum(product, 2), rtol=1e-10)


def two_tokens(log_ratio: float, advantage: float = 1.0) -> Batch:
    """Row 0 has the ratio e^log_ratio, row 1 its inverse; q = 1/4, so that log 2 comes back exactly."""
    q = np.full((2, 1), math.log(0.25))
    return Batch(q + np.array([[log_ratio], [-log_ratio]]), q, np.ones((2, 1), bool), np.full((2, 1), advantage))


def test_bounds_are_inclusive_and_bound_trainer_over_sampler():
    exactly = two_tokens(math.log(2.0))
    assert Mask("token", 0.5, 2.0)(exactly).keep.all()
    assert Mask("token", 0.0, 2.0)(two_tokens(math.log(2.0) + 1e-9)).keep.tolist() == [[False], [True]]
    assert Mask("token", 0.5, math.inf)(two_tokens(math.log(2.0) + 1e-9)).keep.tolist() == [[True], [False]]
    np.testing.assert_allclose(Truncate("token", 1.5)(exactly).weight, [[1.5], [0.5]])


def test_ppo_clips_by_the_sign_of_the_advantage():
    up = PPOClip()(two_tokens(math.log(1.3)))
    down = PPOClip()(two_tokens(math.log(1.3), advantage=-1.0))
    np.testing.assert_allclose(up.weight, [[0.0], [1 / 1.3]])
    np.testing.assert_allclose(down.weight, [[1.3], [0.0]])
    assert up.keep.all()  # clipped tokens stay in the denominator


@given(st.floats(0.001, 0.999), st.floats(-3, 3), st.floats(0.01, 4))
def test_cis_is_a_displacement_of_log_odds(q: float, displacement: float, cap: float):
    """sigma(logit q + min(Delta, cap)) / q, the paper's form, against ours; at most e^cap and at most the ratio."""
    logit = math.log(q / (1 - q))
    p = 1 / (1 + math.exp(-(logit + displacement)))
    batch = Batch(np.log([[p]]), np.log([[q]]), np.ones((1, 1), bool), np.ones((1, 1)))
    weight = CIS(cap)(batch).weight.item()
    expected = 1 / (1 + math.exp(-(logit + min(displacement, cap)))) / q
    assert weight == pytest.approx(expected, rel=1e-9)
    assert weight <= math.exp(cap) * (1 + 1e-9)
    assert weight <= p / q * (1 + 1e-9)
    assert CIS(math.inf)(batch).weight.item() == pytest.approx(p / q, rel=1e-9)


@given(batch=batches(), caps=st.tuples(st.floats(0.5, 4), st.floats(0.5, 4)))
def test_weights_grow_with_the_cap_up_to_exact_importance_sampling(batch: Batch, caps: tuple[float, float]):
    low, high = sorted(caps)
    for level in ("token", "sequence"):
        smaller, larger, exact = (Truncate(level, c)(batch).weight for c in (low, high, math.inf))
        assert (smaller <= larger + 1e-12).all()
        assert (larger <= exact + 1e-12).all()


def test_dlc_weighs_by_the_lag_only_and_centres_at_the_weighted_sampler():
    rng = np.random.default_rng(0)
    mu, lag, offset = rng.normal(size=(3, 1, 1, 3))
    log_mu, log_pi, log_q = log_softmax(mu), log_softmax(mu + lag), log_softmax(mu + offset)
    batch = Batch(
        log_pi[..., 1], log_q[..., 1], np.ones((1, 1), bool), np.ones((1, 1)), log_mu[..., 1],
        logp_train_all=log_pi, logp_sync_all=log_mu, logp_rollout_all=log_q,
    )  # fmt: skip
    ratio = np.exp(log_pi - log_mu)[0, 0]
    q = np.exp(log_q)[0, 0]
    weighted = [q[a] * min(ratio[a], 1.1) for a in range(3)]
    weight, _, centre = DLC(cap=1.1)(batch)
    assert weight.item() == pytest.approx(min(ratio[1], 1.1))
    np.testing.assert_allclose(centre[0, 0] + np.exp(log_pi)[0, 0], np.array(weighted) / sum(weighted), rtol=1e-12)
    unclipped = [q[a] * ratio[a] for a in range(3)]
    weight, _, centre = DLC("sequence", cap=1.1)(batch)
    np.testing.assert_allclose(centre[0, 0] + np.exp(log_pi)[0, 0], np.array(unclipped) / sum(unclipped), rtol=1e-12)


@pytest.mark.parametrize("field", ["logp_sync", "logp_sync_all", "logp_rollout_all", "logp_train_all"])
def test_dlc_says_which_field_is_missing(field: str):
    rng = np.random.default_rng(1)
    every = log_softmax(rng.normal(size=(1, 2, 3)))
    whole = Batch(
        every[..., 0], every[..., 0], np.ones((1, 2), bool), np.ones((1, 1)), every[..., 0],
        logp_train_all=every, logp_sync_all=every, logp_rollout_all=every,
    )  # fmt: skip
    with pytest.raises(BadInput, match=f"no {field},"):
        DLC()(dataclasses.replace(whole, **{field: None}))


def test_unknown_level():
    with pytest.raises(BadInput, match="level is 'segment'"):
        ratios.at_level(np.zeros((1, 1)), "segment", np.ones((1, 1), bool))


@every_correction
@pytest.mark.parametrize("denominator", [*losses.DENOMINATORS, 7])
def test_gradient_of_the_loss_is_minus_the_update(name: str, denominator: str | float):
    """Autograd through torch against finite differences of nothing but the logits, weights held where they are."""
    rng = np.random.default_rng(3)
    logits = rng.normal(size=(2, 3, 4))
    sync, rollout = (log_softmax(logits + 0.4 * rng.normal(size=logits.shape)) for _ in range(2))
    token = rng.integers(4, size=(2, 3))
    mask = np.array([[True, True, False], [True, True, True]])
    advantage = np.array([[1.5], [-0.7]])

    def pick(table):
        return np.take_along_axis(table, token[..., None], -1)[..., 0]

    def batch_of(train: torch.Tensor) -> Batch:
        drawn = train.gather(-1, torch.tensor(token)[..., None])[..., 0]
        other = {"logp_sync": pick(sync), "logp_sync_all": sync, "logp_rollout_all": rollout}
        return Batch(
            drawn, torch.tensor(pick(rollout)), torch.tensor(mask), torch.tensor(advantage),
            logp_train_all=train, **{key: torch.tensor(value) for key, value in other.items()},
        )  # fmt: skip

    theta = torch.tensor(logits, requires_grad=True)
    batch = batch_of(theta.log_softmax(-1))
    corrected = PRESETS[name](batch)
    losses.reinforce(batch, corrected, denominator).backward()
    count = {"fixed": mask.sum(), "kept": max(corrected.keep.sum().item(), 1), "responses": 2, 7: 7}[denominator]
    expected = np.zeros_like(logits)
    pi = np.exp(log_softmax(logits))
    weight = np.broadcast_to(corrected.weight.numpy(), mask.shape)
    for b, t in zip(*np.nonzero(corrected.keep.numpy()), strict=True):
        centre = pi[b, t] + (corrected.centre[b, t].numpy() if not isinstance(corrected.centre, float) else 0.0)
        expected[b, t] = weight[b, t] * advantage[b, 0] * (np.eye(4)[token[b, t]] - centre) / count
    np.testing.assert_allclose(-theta.grad.numpy(), expected, atol=1e-12)

    def value(x: np.ndarray) -> float:
        return losses.reinforce(batch_of(torch.tensor(x).log_softmax(-1)), corrected, denominator).item()

    for index in [(0, 0, 1), (1, 2, 3), (0, 2, 0)]:
        step = np.zeros_like(logits)
        step[index] = 1e-5
        slope = (value(logits + step) - value(logits - step)) / 2e-5
        assert slope == pytest.approx(-expected[index], abs=1e-8)


@every_correction
def test_placeholders_give_a_finite_gradient_and_an_empty_batch_none(name: str):
    rng = np.random.default_rng(4)
    every = torch.tensor(log_softmax(rng.normal(size=(2, 2, 3))))
    for mask in (torch.tensor([[True, False], [True, True]]), torch.zeros(2, 2, dtype=torch.bool)):
        train = every.clone().masked_fill(~mask[..., None], -math.inf).requires_grad_()
        other = every.masked_fill(~mask[..., None], math.nan)
        batch = Batch(
            train[..., 0], other[..., 0], mask, torch.ones(2, 1), other[..., 0],
            logp_train_all=train, logp_sync_all=other, logp_rollout_all=other,
        )  # fmt: skip
        loss = losses.reinforce(batch, PRESETS[name](batch))
        loss.backward()
        assert torch.isfinite(train.grad).all()
        if not mask.any():
            assert loss.item() == 0.0
            assert (train.grad == 0).all()


def test_unknown_denominator():
    batch = two_tokens(0.1)
    with pytest.raises(BadInput, match="denominator is 'mean'"):
        losses.reinforce(batch, CORRECTIONS["none"](batch), "mean")


def test_a_composition_multiplies_weights_and_ands_masks():
    """Discrepancy handling times lag handling: TIS of mu/q at 2 times pi/mu is not TIS of pi/q."""
    q, mu, pi = (np.log([[a, b]]) for a, b in ((0.1, 0.2), (0.4, 0.3), (0.2, 0.6)))
    batch = Batch(pi, q, np.ones((1, 2), bool), np.ones((1, 1)), mu)
    both = Compose((Truncate("token", 2.0, "discrepancy"), Truncate("token", math.inf, "lag")))(batch)
    np.testing.assert_allclose(both.weight, [[2.0 * 0.5, 1.5 * 2.0]])
    masked = Compose((Mask("token", 0.0, 3.0, "discrepancy"), Mask("token", 0.6, 9.0, "lag")))(batch)
    assert masked.keep.tolist() == [[False, True]]  # mu/q = 4 and pi/mu = 1/2 reject the first token
    with pytest.raises(BadInput, match="rules: two of them centre"):
        Compose((DLC(), DLC()))


def test_a_weight_of_zero_survives_an_infinite_one():
    batch = Batch(np.array([[-1.0]]), np.array([[-2000.0]]), np.ones((1, 1), bool), np.ones((1, 1)))
    with np.errstate(over="ignore"):
        zero = Compose((Mask("token", 0.0, 2.0), Truncate("token", math.inf)))(batch)
    assert zero.weight.tolist() == [[0.0]]


@pytest.mark.parametrize("on", ["total", "lag", "discrepancy", "behaviour", "drift"])
def test_every_log_ratio_is_numerator_minus_denominator(on: str):
    logs = {"train": -1.0, "sync": -1.5, "old": -2.5, "rollout": -4.5}
    batch = Batch(
        *(np.array([[logs[k]]]) for k in ("train", "rollout")), np.ones((1, 1), bool), np.ones((1, 1)),
        np.array([[logs["sync"]]]), np.array([[logs["old"]]]),
    )  # fmt: skip
    expected = {"total": 3.5, "lag": 0.5, "discrepancy": 3.0, "behaviour": 2.0, "drift": 1.5}[on]
    assert batch.log_ratio(on).item() == expected
    assert Truncate("token", math.inf, on)(batch).weight.item() == math.exp(expected)
    unanchored = dataclasses.replace(batch, logp_old=None)
    assert unanchored.log_ratio("drift").item() == 0.0
    assert unanchored.log_ratio("behaviour").item() == 3.5
    with pytest.raises(BadInput, match="log ratio is 'old', expected one of total"):
        batch.log_ratio("old")


@given(batch=batches(), level=st.sampled_from(["token", "sequence", "geometric", "prefix"]))
def test_normalised_weights_have_mean_one_and_no_scale(batch: Batch, level):
    """Self-normalised weights do not move when every trainer probability of a response is scaled alike."""
    rule = Truncate(level, math.inf, normalise=True)
    weight = rule(batch).weight
    per_token = level in ("token", "prefix")
    counted = batch.mask if per_token else batch.mask.any(-1, keepdims=True)
    if counted.any():
        assert weight[counted].mean() == pytest.approx(1.0, rel=1e-12)
    if level in ("token", "geometric"):
        moved = dataclasses.replace(batch, logp_train=batch.logp_train - 3.0)
        np.testing.assert_allclose(rule(moved).weight[counted], weight[counted], rtol=1e-9)


def test_self_normalised_weights_do_not_overflow():
    rollout = np.full((3, 2), -2000.0)
    batch = Batch(rollout + np.array([[900.0], [899.5], [-900]]), rollout, np.ones((3, 2), bool), np.ones((3, 1)))
    total = 1 + math.exp(-1.0)
    np.testing.assert_allclose(PRESETS["snis"](batch).weight[:, 0], [3 / total, 3 / total / math.e, 0.0])


def test_learning_rate_times_ess():
    assert TimesEss()(0.25) == 0.25
    assert TimesEss(0.5)(0.25) == 0.5
    assert TimesEss()(math.nan) == 0.0


def test_unknown_estimator_and_aggregate():
    with pytest.raises(BadInput, match="estimator is 'k4'"):
        Divergence("k4")
    with pytest.raises(BadInput, match="aggregate is 'median'"):
        Divergence(aggregate="median")(two_tokens(0.1))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, np.float16, np.float32])
def test_low_precision_is_widened_before_anything_is_computed(dtype):
    """300 tokens of log ratio 2^-6: exact in every input dtype, their sum is not in bfloat16."""
    rollout = np.full((1, 300), -1.0)
    fields = (rollout + 2**-6, rollout)
    if isinstance(dtype, torch.dtype):
        batch = Batch(*(torch.tensor(x, dtype=dtype) for x in fields), torch.ones(1, 300) > 0, torch.ones(1, 1))
    else:
        batch = Batch(*(x.astype(dtype) for x in fields), np.ones((1, 300), bool), np.ones((1, 1)))
    weight = PRESETS["seq_is"](batch).weight
    assert float(weight[0, 0]) == pytest.approx(math.exp(300 / 64), rel=1e-6)
    assert str(weight.dtype).removeprefix("torch.") == ("float32" if isinstance(dtype, torch.dtype) else "float64")


@pytest.mark.parametrize(
    "make",
    [
        lambda: Truncate(cap=math.nan),
        lambda: Truncate(cap=-1.0),
        lambda: Truncate(cap=0.5, floor=0.7),
        lambda: Mask(low=5.0, high=0.5),
        lambda: PPOClip(-0.2, -0.3),
        lambda: PPOClip(math.nan, 0.2),
        lambda: CIS(math.nan),
        lambda: CIS(-3.0, -2.0),
        lambda: DLC(cap=0.0),
        lambda: Centre(cap=math.nan),
        lambda: Mask(low=-1.0, weigh=False),
        lambda: Veto(low=math.nan),
    ],
)
def test_bounds_that_would_train_on_nothing_are_refused(make):
    with pytest.raises(BadInput, match="expected 0 "):
        make()
