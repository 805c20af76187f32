"""Top-k centring against the whole vocabulary: equal at k = V, close and improving below it, guarded where pi ends."""

import dataclasses
import math

import numpy as np
import pytest
import torch

from sandbox.arrays import log_softmax
from sandbox.batch import Batch
from sandbox.corrections import DLC, losses, ratios


def peaked(vocabulary: int = 12, rows: int = 2, width: int = 3, seed: int = 0) -> dict[str, np.ndarray]:
    """log pi, log mu and log q over a vocabulary whose tail is light, the sampler's order first. (B, T, V)"""
    rng = np.random.default_rng(seed)
    logits = -0.9 * np.arange(vocabulary) + 0.1 * rng.normal(size=(rows, width, vocabulary))
    sync = logits + 0.2 * rng.normal(0.1, 1, size=logits.shape)
    every = {"rollout": logits, "sync": sync, "train": sync + 0.3 * rng.normal(0.2, 1, size=logits.shape)}
    return {name: log_softmax(x) for name, x in every.items()}


def with_top(every: dict[str, torch.Tensor], k: int, token: torch.Tensor) -> Batch:
    top = every["rollout"].topk(k, dim=-1).indices
    drawn = {f"logp_{n}": x.gather(-1, token)[..., 0] for n, x in every.items()}
    columns = {f"logp_{n}_all": x.gather(-1, top) for n, x in every.items()}
    shape = token.shape[:2]
    return Batch(mask=torch.ones(shape, dtype=torch.bool), advantage=torch.ones(shape[0], 1), **drawn, **columns)


def score_gradient(k: int, level: str = "token", seed: int = 0) -> np.ndarray:
    """Gradient of the centred loss with respect to the logits of pi. (B, T, V)"""
    tables = peaked(seed=seed)
    logits = torch.tensor(tables["train"], requires_grad=True)
    every = {n: torch.tensor(x) for n, x in tables.items()} | {"train": logits.log_softmax(-1)}
    token = torch.tensor(np.random.default_rng(seed).integers(3, size=(2, 3, 1)))
    batch = with_top(every, k, token)
    losses.reinforce(batch, DLC(level)(batch)).backward()
    return logits.grad.numpy()


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_the_whole_vocabulary_in_any_order_is_the_exact_form(level: str):
    """Against THEORY section 4 in probabilities: weight times (e_a - c), c proportional to q min(r, C)."""
    tables = peaked()
    token = np.random.default_rng(0).integers(3, size=(2, 3, 1))
    pi, mu, q = (np.exp(tables[n]) for n in ("train", "sync", "rollout"))
    cap = 2.0 if level == "token" else math.inf
    c = q * np.minimum(pi / mu, cap)
    c /= c.sum(-1, keepdims=True)
    drawn = np.take_along_axis(pi / mu, token, -1)[..., 0]
    drawn = drawn if level == "token" else np.broadcast_to(drawn.prod(-1, keepdims=True), drawn.shape)
    expected = np.minimum(drawn, 2.0)[..., None] * (np.eye(12)[token[..., 0]] - c) / 6
    np.testing.assert_allclose(-score_gradient(12, level), expected, atol=1e-15)


def test_the_top_k_form_by_hand():
    """c outside the top k is kappa pi; the gradient in the logits is weight (e_a - c) over the whole vocabulary."""
    tables, k = peaked(), 4
    token = np.random.default_rng(0).integers(3, size=(2, 3, 1))
    pi, mu, q = (np.exp(tables[n]) for n in ("train", "sync", "rollout"))
    expected = np.zeros_like(pi)
    for b, t in np.ndindex(pi.shape[:2]):
        top = np.argsort(-q[b, t])[:k]
        mass = [q[b, t, a] * min(pi[b, t, a] / mu[b, t, a], 2.0) for a in top]
        z = sum(mass) + 1 - sum(q[b, t, top])
        c = np.zeros(12)
        c[top] = np.array(mass) / z
        rest = [a for a in range(12) if a not in top]
        c[rest] = (1 - c.sum()) * pi[b, t, rest] / pi[b, t, rest].sum()
        a = token[b, t, 0]
        expected[b, t] = min(pi[b, t, a] / mu[b, t, a], 2.0) * (np.eye(12)[a] - c) / 6
    np.testing.assert_allclose(-score_gradient(k), expected, atol=1e-14)


def test_more_columns_come_closer():
    exact = score_gradient(12)
    errors = [np.abs(score_gradient(k) - exact).max() for k in (2, 4, 6, 8, 11)]
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < 1e-5 < errors[0]


def test_where_the_top_k_hold_all_of_pi_the_guard_takes_over():
    """pi outside the top 2 underflows: kappa would be 0/0 or noise over noise; the coefficients stay c - pi."""
    q = np.log(np.array([[[0.6, 0.4 - 1e-9]]]))
    pi = np.log(np.array([[[0.7, 0.3]]]))
    centre = ratios.centring(q, pi, pi - q, 2.0)
    np.testing.assert_allclose(centre, 0.0, atol=1e-8)
    assert np.isfinite(ratios.centring(q, pi - 1e-16, pi - q, 2.0)).all()
    for dtype in (torch.float32, torch.float64):  # 5,000 columns that are the whole vocabulary, sums off by rounding
        every = torch.randn(4, 1, 5000, dtype=dtype, generator=torch.Generator().manual_seed(0)).log_softmax(-1)
        coefficients = ratios.centring(every, every, every * 0, 2.0)
        assert coefficients.abs().max() < 1e-5


def test_numpy_equals_torch_below_the_whole_vocabulary():
    tables = {n: x[..., :5] for n, x in peaked().items()}
    ours = ratios.centring(tables["rollout"], tables["train"], tables["train"] - tables["sync"], 1.5)
    theirs = {n: torch.tensor(x) for n, x in tables.items()}
    theirs = ratios.centring(theirs["rollout"], theirs["train"], theirs["train"] - theirs["sync"], 1.5)
    np.testing.assert_allclose(theirs.numpy(), ours, rtol=1e-12, atol=1e-15)


def test_masked_places_have_no_coefficients_whatever_they_hold():
    tables = {n: torch.tensor(x) for n, x in peaked().items()}
    batch = with_top(tables, 4, torch.zeros(2, 3, 1, dtype=torch.int64))
    mask = torch.tensor([[True, False, True], [False, False, True]])
    junk = {f.name: getattr(batch, f.name) for f in dataclasses.fields(batch)}
    junk = {n: x.masked_fill(~mask[..., None], math.nan) if n.endswith("_all") else x for n, x in junk.items()}
    centre = DLC()(Batch(**{**junk, "mask": mask})).centre
    assert (centre[~mask] == 0).all()
    assert torch.isfinite(centre).all()
