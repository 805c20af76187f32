"""prime-rl's custom loss, called as its caller does: one sequence a call, (T,) tensors, the sum over a global count.

Not run against prime-rl itself: it is on no package index, and its own lock needs CUDA (commit 559b4477:
`uv sync && uv run rl @ CONFIG`, with the lines of realmodel/adapters/examples/prime_rl.toml).
"""

import tomllib
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from realmodel.adapters.prime_rl_loss import loss
from sandbox.errors import BadInput
from tests.support.reference_frameworks import prime_rl as slow

LENGTHS = [5, 1, 8, 3]


def sequences(seed: int = 0) -> list[SimpleNamespace]:
    rng = torch.Generator().manual_seed(seed)
    result = []
    for n in LENGTHS:
        q = -torch.rand(n, generator=rng).double() * 3 - 0.05
        pi = torch.minimum(q + 0.7 * torch.randn(n, generator=rng), torch.tensor(-1e-3)).requires_grad_()
        mask = torch.rand(n, generator=rng) < 0.8  # a prompt's and a tool's tokens are in the sequence too
        advantage = torch.randn(1, generator=rng).double().expand(n).clone()
        result.append(
            SimpleNamespace(
                trainer_logprobs=pi,
                inference_logprobs=q,
                ref_logprobs=None,
                advantages=advantage,
                loss_mask=mask,
                loss_weights=None,
            )
        )
    return result


def test_its_own_default_written_slowly():
    """`prime_rl.default` and its penalty: the same gradient per token as prime-rl's rule in scalar loops."""
    parts, tau, scale = sequences(), 1e-3, 13
    total = sum(loss(part, "prime_rl.default", tau).loss for part in parts) / scale
    total.backward()
    for part in parts:
        index = part.loss_mask.nonzero()[:, 0].tolist()
        pi, q, a = (x.tolist() for x in (part.trainer_logprobs, part.inference_logprobs, part.advantages))
        expected = [0.0] * len(pi)
        if index:
            slowly = slow("default", [[(pi[t], pi[t], q[t]) for t in index]], [a[0]])
            for t, weight in zip(index, slowly.update[0], strict=True):
                expected[t] = (-weight * a[0] + 2 * tau * (pi[t] - q[t])) / scale
        assert part.trainer_logprobs.grad.tolist() == pytest.approx(expected, rel=1e-9, abs=1e-12)


def test_token_weights_scale_the_loss_and_nothing_is_nan_where_all_is_masked():
    part = sequences()[2]
    plain = loss(part, "cis").loss
    part.loss_weights = torch.full_like(part.advantages, 0.25)
    torch.testing.assert_close(loss(part, "cis").loss, plain / 4)
    part.loss_mask = torch.zeros_like(part.loss_mask)
    result = loss(part, "seq_tis", 1e-3)
    assert result.loss == 0
    assert all(torch.isfinite(value) and value.ndim == 0 for value in result.metrics.values())


@pytest.mark.parametrize(
    ("rule", "words"),
    [
        ("dlc", "centres the score"),
        ("snis", "a mean over the batch"),
        ('{"preset": "Truncate", "on": "lag"}', "no logp_sync"),
        ("tsi", "unknown correction"),
    ],
)
def test_what_the_hook_cannot_express_is_refused(rule: str, words: str):
    with pytest.raises(BadInput, match=words):
        loss(sequences()[0], rule)


def test_the_example_names_this_function():
    config = tomllib.loads(Path("realmodel/adapters/examples/prime_rl.toml").read_text())["trainer"]["loss"]
    module, _, name = config["import_path"].rpartition(".")
    assert config["type"] == "custom"
    assert torch.isfinite(getattr(import_module(module), name)(sequences()[0], **config["kwargs"]).loss)
