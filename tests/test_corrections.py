"""Contract, values and gradients of every correction: slow scalar loops, numpy against torch, exact unbiasedness."""

import dataclasses
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sandbox import losses, ratios
from sandbox.arrays import log_softmax
from sandbox.batch import Batch
from sandbox.corrections import CIS, CORRECTIONS, DLC, Correction, Mask, PPOClip, Truncate
from sandbox.errors import BadInput
from tests import reference
from tests.strategies import batches

every_correction = pytest.mark.parametrize("name", CORRECTIONS)


def as_torch(batch: Batch, gradient: bool = False) -> Batch:
    values = {f.name: getattr(batch, f.name) for f in dataclasses.fields(batch)}
    return Batch(
        **{
            name: torch.tensor(value, requires_grad=gradient and name == "logp_train") if value is not None else None
            for name, value in values.items()
        }
    )


def on_policy(batch: Batch) -> Batch:
    fields = {f"logp_{who}": batch.logp_rollout for who in ("train", "sync")}
    return dataclasses.replace(batch, **fields, **{f"{name}_all": batch.logp_rollout_all for name in fields})


def rows(batch: Batch, index: np.ndarray) -> Batch:
    values = {f.name: getattr(batch, f.name) for f in dataclasses.fields(batch)}
    return Batch(**{name: value[index] if value is not None else None for name, value in values.items()})


@every_correction
@given(batch=batches())
def test_contract(name: str, batch: Batch):
    correction = CORRECTIONS[name]
    assert isinstance(correction, Correction)
    hash(correction)
    with pytest.raises(dataclasses.FrozenInstanceError):
        correction.cap = 3.0  # type: ignore[attr-defined]
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


@every_correction
@given(batch=batches())
def test_without_mismatch_every_correction_is_the_identity(name: str, batch: Batch):
    weight, keep, centre = CORRECTIONS[name](on_policy(batch))
    np.testing.assert_allclose(weight, 1, rtol=1e-12)
    np.testing.assert_array_equal(keep, batch.mask)
    np.testing.assert_allclose(centre, 0, atol=1e-12)


@every_correction
@given(batch=batches(), data=st.data())
def test_masked_places_and_the_order_of_responses_do_not_matter(name: str, batch: Batch, data):
    weight, keep, centre = CORRECTIONS[name](batch)
    junk = data.draw(st.sampled_from([0.0, 1.0, 7.5, np.nan, -np.inf]))
    changed = {
        f.name: np.where(
            batch.mask if getattr(batch, f.name).ndim == 2 else batch.mask[..., None], getattr(batch, f.name), junk
        )
        for f in dataclasses.fields(batch)
        if f.name.startswith("logp_") and getattr(batch, f.name) is not None
    }
    again = CORRECTIONS[name](dataclasses.replace(batch, **changed))
    order = np.array(data.draw(st.permutations(range(len(batch.mask)))))
    moved = CORRECTIONS[name](rows(batch, order))
    counted = batch.mask if weight.shape == batch.mask.shape else batch.mask[:, :1] | True
    np.testing.assert_array_equal(again.weight[counted], weight[counted])
    np.testing.assert_array_equal(again.keep, keep)
    np.testing.assert_array_equal(again.centre, centre)
    np.testing.assert_array_equal(moved.weight, weight[order])
    np.testing.assert_array_equal(moved.keep, keep[order])


@every_correction
@given(batch=batches())
def test_numpy_equals_torch_and_nothing_carries_a_gradient(name: str, batch: Batch):
    ours, theirs = CORRECTIONS[name](batch), CORRECTIONS[name](as_torch(batch, gradient=True))
    for a, b in zip(ours, theirs, strict=True):
        if isinstance(b, torch.Tensor):
            assert not b.requires_grad
            np.testing.assert_allclose(b.numpy(), a, rtol=1e-12, atol=1e-12)
        else:
            assert a == b


TOKEN_LEVEL = ["none", "tis", "mis", "icepop", "ppo", "cis", "dlc"]


@pytest.mark.parametrize("name", TOKEN_LEVEL)
@given(batch=batches())
def test_token_weights_against_a_scalar_loop(name: str, batch: Batch):
    weight = np.broadcast_to(CORRECTIONS[name](batch).weight, batch.mask.shape)
    for b, t in zip(*np.nonzero(batch.mask), strict=True):
        pi, mu, q = (np.exp(x[b, t]) for x in (batch.logp_train, batch.logp_sync, batch.logp_rollout))
        bounds = (0.5, 0.8, 1.2, 2.0, 5.0)
        if min(abs(pi / q / bound - 1) for bound in bounds) < 1e-9:
            continue  # on a bound rounding decides
        expected = reference.token_weight(name, pi, mu, q, float(batch.advantage[b, 0]))
        np.testing.assert_allclose(weight[b, t], expected, rtol=1e-10)


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
@pytest.mark.parametrize("denominator", losses.DENOMINATORS)
def test_gradient_of_the_loss_is_minus_the_update(name: str, denominator: str):
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
    corrected = CORRECTIONS[name](batch)
    losses.reinforce(batch, corrected, denominator).backward()
    count = {"fixed": mask.sum(), "kept": corrected.keep.sum().item(), "responses": 2}[denominator]
    expected = np.zeros_like(logits)
    pi = np.exp(log_softmax(logits))
    weight = np.broadcast_to(corrected.weight.numpy(), mask.shape)
    for b, t in zip(*np.nonzero(corrected.keep.numpy()), strict=True):
        centre = pi[b, t] + (corrected.centre[b, t].numpy() if not isinstance(corrected.centre, float) else 0.0)
        expected[b, t] = weight[b, t] * advantage[b, 0] * (np.eye(4)[token[b, t]] - centre) / count
    np.testing.assert_allclose(-theta.grad.numpy(), expected, atol=1e-12)  # type: ignore[union-attr]

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
        loss = losses.reinforce(batch, CORRECTIONS[name](batch))
        loss.backward()
        assert torch.isfinite(train.grad).all()  # type: ignore[arg-type]
        if not mask.any():
            assert loss.item() == 0.0
            assert (train.grad == 0).all()  # type: ignore[operator]


def test_unknown_denominator():
    batch = two_tokens(0.1)
    with pytest.raises(BadInput, match="denominator is 'mean'"):
        losses.reinforce(batch, CORRECTIONS["none"](batch), "mean")
