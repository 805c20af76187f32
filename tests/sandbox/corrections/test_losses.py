"""Losses: the gradient is the update, denominators as named, nothing and everything rejected, compiled and vmapped."""

import dataclasses
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings

from sandbox.batch import Batch
from sandbox.corrections import DLC, PRESETS, Compose, Corrected, PPOClip, ProbabilityBand, Truncate, losses
from sandbox.errors import BadInput
from tests.sandbox.corrections.test_rules import as_torch
from tests.support.strategies import batches


def random_batch(rows: int = 4, width: int = 5, seed: int = 0, vocabulary: int = 4) -> Batch:
    """Torch, float64, logp_train a leaf with gradient; the masked places hold nan."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=(rows, width, vocabulary))
    every = {}
    for name, sd in (("rollout", 0.0), ("sync", 0.4), ("old", 0.3), ("train", 0.4)):
        logits = logits + sd * rng.normal(0.3, 1, size=logits.shape)
        every[name] = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    token = rng.integers(vocabulary, size=(rows, width, 1))
    mask = rng.random((rows, width)) < 0.8
    drawn = {f"logp_{k}": np.take_along_axis(v, token, -1)[..., 0] for k, v in every.items()}
    drawn = {k: np.where(mask, v, np.nan) for k, v in drawn.items()}
    whole = {f"logp_{k}_all": v for k, v in every.items() if k != "old"}
    return as_torch(Batch(mask=mask, advantage=rng.normal(0.2, 1, (rows, 1)), **drawn, **whole), gradient=True)


def gradient(loss: torch.Tensor, batch: Batch) -> np.ndarray:
    return torch.autograd.grad(loss, batch.logp_train)[0].numpy()


@pytest.mark.parametrize("on", ["total", "drift", "lag"])
@pytest.mark.parametrize("level", ["token", "geometric"])
def test_ppo_has_the_gradient_of_its_correction(on, level):
    """As a surrogate with a value of its own and as a weight on the score: one gradient (but GSPO's 1/T)."""
    batch = random_batch(8, 6)
    clip = PPOClip(0.1, 0.3, dual=1.5, level=level, on=on)
    behaviour = Truncate("token" if level == "token" else "sequence", 1.2, "behaviour")
    direct = gradient(losses.ppo(batch, behaviour(batch), clip), batch)
    both = Compose((behaviour, clip))(batch)
    if level == "token":
        np.testing.assert_allclose(gradient(losses.reinforce(batch, both), batch), direct, atol=1e-12)
        assert (both.weight == 0).any()
        assert (both.weight > 0).any()
        return
    # the weight of sequence s on each token's score; the surrogate's s A summed over its T tokens moves by T (s/T)
    np.testing.assert_allclose(gradient(losses.reinforce(batch, both), batch), direct, atol=1e-12)


def test_ppo_value_by_hand():
    ratio = np.array([[1.5, 0.5, 1.5, 0.5, 4.0]])
    a = np.array([[1.0, 1.0, -1.0, -1.0, -1.0]])
    q = np.full((1, 5), -2.0)
    batch = Batch(q + np.log(ratio), q, np.ones((1, 5), bool), a)
    one = PRESETS["none"](batch)
    assert losses.ppo(batch, one) == pytest.approx(-(1.2 + 0.5 - 1.5 - 0.8 - 4.0) / 5)
    assert losses.ppo(batch, one, PPOClip(dual=3.0)) == pytest.approx(-(1.2 + 0.5 - 1.5 - 0.8 - 3.0) / 5)
    assert losses.ppo(batch, Truncate("token", 2.0)(batch)) == pytest.approx(
        -(1.5 * 1.2 + 0.5 * 0.5 - 1.5 * 1.5 - 0.5 * 0.8 - 2.0 * 4.0) / 5
    )
    with pytest.raises(BadInput, match="clip acts on 'behaviour'"):
        losses.ppo(batch, one, PPOClip(on="behaviour"))


def test_cispo_and_dppo_are_reinforce_with_their_weights():
    batch = random_batch()
    for loss, rule in ((losses.cispo(batch), PRESETS["cispo"]), (losses.dppo(batch), PRESETS["dppo"])):
        np.testing.assert_array_equal(gradient(loss, batch), gradient(losses.reinforce(batch, rule(batch)), batch))
    band = ProbabilityBand(0.01, 0.01)
    tight = gradient(losses.dppo(batch, band, cap=1.1), batch)
    rule = Compose((Truncate("token", 1.1), band))
    np.testing.assert_array_equal(tight, gradient(losses.reinforce(batch, rule(batch)), batch))


def test_prime_rl_penalty_pulls_every_token_towards_the_sampler():
    batch = random_batch()
    t = np.where(batch.mask, (batch.logp_train - batch.logp_rollout).detach().numpy(), 0.0)
    loss = losses.squared_mismatch(batch, 0.1)
    assert loss.item() == pytest.approx(0.1 * (t**2).sum() / batch.mask.sum().item())
    np.testing.assert_allclose(gradient(loss, batch), 0.2 * t / batch.mask.sum().item(), atol=1e-15)


@given(batch=batches())
@settings(max_examples=60)
def test_gradients_equal_finite_differences_with_placeholders_in_place(batch: Batch):
    """Every loss, with respect to log pi of the drawn tokens; the clip's kinks within 1e-4 are left out."""
    tensors = as_torch(batch, gradient=True)
    one = PRESETS["tis"](tensors)
    total = np.where(batch.mask, np.nan_to_num(batch.logp_train) - np.nan_to_num(batch.logp_rollout), 0.0)
    smooth = all(np.abs(total - math.log(x)).min() > 1e-4 for x in (0.8, 1.2))
    rules = {
        "reinforce": lambda b: losses.reinforce(b, one),
        "centred": lambda b: losses.reinforce(b, DLC()(tensors), "kept"),
        "penalty": lambda b: losses.squared_mismatch(b),
    } | ({"ppo": lambda b: losses.ppo(b, one, denominator="responses")} if smooth else {})
    for name, loss in rules.items():
        exact = gradient(loss(tensors), tensors)
        assert np.isfinite(exact).all(), name
        assert (exact[~batch.mask] == 0).all(), name
        for index in list(zip(*np.nonzero(batch.mask), strict=True))[:3]:
            values = []
            for h in (1e-6, -1e-6):
                moved = batch.logp_train.copy()
                moved[index] += h
                values.append(float(loss(dataclasses.replace(tensors, logp_train=torch.tensor(moved)))))
            assert (values[0] - values[1]) / 2e-6 == pytest.approx(exact[index], abs=1e-6), name


@pytest.mark.parametrize("loss", ["reinforce", "ppo"])
@pytest.mark.parametrize("denominator", ["fixed", "kept", "responses"])
@pytest.mark.parametrize("case", ["empty mask", "no response", "all rejected"])
def test_nothing_to_learn_from_is_loss_zero_gradient_zero(loss: str, denominator: str, case: str):
    batch = random_batch(0 if case == "no response" else 3)
    if case == "empty mask":
        batch = dataclasses.replace(batch, mask=torch.zeros_like(batch.mask))
    corrected = PRESETS["tis"](batch)
    if case == "all rejected":
        corrected = corrected._replace(keep=torch.zeros_like(batch.mask))
    value = getattr(losses, loss)(batch, corrected, denominator=denominator)
    assert value.item() == 0.0
    assert (gradient(value, batch) == 0).all()
    account = losses.accounts(batch, corrected)
    expected = "every token is rejected" if case == "all rejected" else "the mask counts no token"
    assert account["alarm"] == expected
    assert account["rejected_fraction"] == (1.0 if case == "all rejected" else 0.0)
    assert account["loss_fixed"] == account["loss_kept"] == 0.0


@pytest.mark.parametrize(("rows", "width"), [(0, 4), (3, 0)])
def test_a_batch_without_rows_or_columns_is_legal_for_every_preset(rows, width):
    batch = random_batch(4, 5)
    empty = Batch(
        **{name: x[:rows, : min(width, x.shape[1])] for name, x in vars(batch).items() if hasattr(x, "shape")}
    )
    empty = replace(empty, advantage=batch.advantage[:rows])
    for name, rule in PRESETS.items():
        loss = losses.reinforce(empty, rule(empty))
        assert float(loss.detach()) == 0.0, name
        assert losses.accounts(empty, rule(empty))["alarm"] == "the mask counts no token"


def test_accounts_report_both_denominators_and_wild_weights():
    batch = random_batch(6, 6)
    corrected = PRESETS["mis"](batch)
    account = losses.accounts(batch, corrected)
    n, kept = int(batch.mask.sum()), int(corrected.keep.sum())
    assert 0 < kept < n
    assert (account["tokens"], account["tokens_kept"]) == (n, kept)
    assert account["rejected_fraction"] == pytest.approx(1 - kept / n)
    assert account["loss_kept"] == pytest.approx(account["loss_fixed"] * n / kept)
    assert account["alarm"] == ""
    keep = batch.mask & (torch.arange(6) > 1)[:, None]
    some = losses.accounts(batch, Corrected(corrected.weight, keep, 0.0))
    counted = batch.mask.any(1)
    assert 0 < some["rejected_responses"] == pytest.approx(1 - float(counted[2:].sum()) / float(counted.sum()))
    inf = Corrected(torch.full_like(corrected.weight, math.inf), batch.mask, 0.0)
    assert losses.accounts(batch, inf)["alarm"] == f"{n} weights are not finite"


@pytest.mark.parametrize("name", ["none", "tis", "seq_is", "mis", "ppo", "cis", "dlc"])
def test_a_token_that_the_trainer_rules_out_has_no_score_and_an_alarm(name):
    """Loss and gradient are those of the batch without it; its weight may still be 0 or 1."""
    logits = torch.tensor([[[0.3, -0.2, 0.5], [0.1, 0.7, -math.inf]]], requires_grad=True)
    logp = torch.log_softmax(logits, -1)
    q = torch.log_softmax(torch.tensor([[[0.2, 0.1, 0.4], [0.3, 0.2, 0.1]]]), -1)
    drawn = torch.tensor([[[0], [2]]])
    train, rollout = (p.gather(-1, drawn)[..., 0] for p in (logp, q))
    every = {"logp_train_all": logp, "logp_sync_all": q, "logp_rollout_all": q}
    batch = Batch(train, rollout, torch.tensor([[True, True]]), torch.tensor([[1.5]]), rollout, **every)
    corrected = PRESETS[name](batch)
    loss = losses.reinforce(batch, corrected)
    (grad,) = torch.autograd.grad(loss, logits)
    assert torch.isfinite(loss)
    assert torch.isfinite(grad).all()
    assert (grad[0, 1] == 0).all()
    if name in ("none", "dlc"):
        assert losses.accounts(batch, corrected)["alarm"] == "1 drawn tokens have probability 0 under the trainer"


def test_a_number_is_the_global_count():
    """Micro-batches that divide by the global count add up to the whole batch's loss, of any sizes."""
    batch = random_batch(6, 5)
    whole = losses.reinforce(batch, PRESETS["tis"](batch))
    n = int(batch.mask.sum())
    parts = [batch.rows(slice(0, 1)), batch.rows(slice(1, 6))]
    assert sum(losses.reinforce(p, PRESETS["tis"](p), n).item() for p in parts) == pytest.approx(whole.item())
    with pytest.raises(BadInput, match="denominator is 0"):
        losses.reinforce(batch, PRESETS["tis"](batch), 0)


def test_a_token_the_trainer_rules_out_has_weight_zero_and_a_finite_loss():
    p = torch.tensor([[-math.inf, -0.5]], requires_grad=True)
    batch = Batch(p, torch.tensor([[-0.7, -0.6]]), torch.ones(1, 2, dtype=torch.bool), torch.ones(1, 1))
    loss = losses.reinforce(batch, PRESETS["tis"](batch))
    loss.backward()
    assert torch.isfinite(loss)
    assert torch.isfinite(p.grad).all()


def tables(batch: Batch) -> tuple:
    drawn = batch.logp_train.detach(), batch.logp_rollout, batch.mask, batch.advantage, batch.logp_sync, batch.logp_old
    return *drawn, batch.logp_train_all, batch.logp_sync_all, batch.logp_rollout_all


def loss_of(name: str):
    def value(*given):
        batch = Batch(*given)
        return losses.reinforce(batch, PRESETS[name](batch), "kept")

    return value


def test_vmap_over_groups_equals_a_loop():
    groups = [tables(random_batch(seed=seed)) for seed in range(3)]
    stacked = tuple(torch.stack(x) for x in zip(*groups, strict=True))
    for name in PRESETS:
        value = loss_of(name)
        together = torch.func.vmap(torch.func.grad(value))(*stacked)
        alone = torch.stack([torch.func.grad(value)(*g) for g in groups])
        torch.testing.assert_close(together, alone, rtol=1e-12, atol=1e-14, msg=name)


QUICK = ("tis", "dlc", "slime.mis", "areal.token_k3", "opsm")


@pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in PRESETS])
@pytest.mark.filterwarnings("ignore::UserWarning:torch")  # a hundred lines on cached functions of array-api-compat
def test_compiles_as_one_graph(name: str):
    """The graph is captured whole; run as it is, without a C++ compiler, which `make bench` has."""
    torch.compiler.reset()  # every preset goes through the same lines of code: else they would count as recompilations
    given = tables(random_batch())
    compiled = torch.compile(loss_of(name), fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(*given), loss_of(name)(*given), rtol=1e-12, atol=1e-14)
