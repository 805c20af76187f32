"""slime's custom TIS function, called as its loss calls it: lists of responses, one flat loss, one micro-batch.

Not run against slime itself: it is on no package index (the PyPI project of that name is another), and needs Megatron
and CUDA (commit 624b824a: its container, with the lines of realmodel/adapters/examples/slime.sh).
"""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml

from realmodel.adapters.slime_tis import tis
from sandbox.errors import BadInput
from tests.support.reference_frameworks import slime as slow

LENGTHS = [5, 1, 8, 3]


def call(rule: str, **changes):
    """(result, what was passed): old, q, masks with holes as after a tool call, a loss per local token."""
    rng = torch.Generator().manual_seed(0)
    q = [-torch.rand(n, generator=rng).double() * 3 - 0.05 for n in LENGTHS]
    old = [torch.minimum(x + 0.7 * torch.randn(len(x), generator=rng), torch.tensor(-1e-3)) for x in q]
    passed = {
        "args": SimpleNamespace(mismatch_correction=rule),
        "pg_loss": torch.randn(sum(LENGTHS), generator=rng).double().requires_grad_(),
        "train_log_probs": old,
        "rollout_log_probs": q,
        "loss_masks": [(torch.rand(n, generator=rng) < 0.8).int() for n in LENGTHS],
        "total_lengths": [n + 4 for n in LENGTHS],
        "response_lengths": LENGTHS,
    } | changes
    args = passed.pop("args")
    return tis(args, **passed), passed


@pytest.mark.parametrize("name", ["tis", "icepop", "mis"])
def test_slimes_own_rules_written_slowly(name: str):
    """Weights and masks, on counted tokens, of slime's three rules; pi = old here, so PPO's weight is 1."""
    (loss, masks, metrics), passed = call(f"slime.{name}")
    counted = [mask.nonzero()[:, 0].tolist() for mask in passed["loss_masks"]]
    tokens = [
        [(old[t].item(), old[t].item(), q[t].item()) for t in rows]
        for old, q, rows in zip(passed["train_log_probs"], passed["rollout_log_probs"], counted, strict=True)
    ]
    expected = slow(name, [row for row in tokens if row], [1.0] * sum(map(bool, tokens)))
    weights, keeps = iter(expected.update), iter(expected.mask)
    start = 0
    for n, rows, mask in zip(LENGTHS, counted, masks, strict=True):
        want, kept = torch.zeros(n).double(), torch.zeros(n).int()
        if rows:
            want[rows] = torch.tensor(next(weights)).double()
            kept[rows] = torch.tensor(next(keeps)).int()
        torch.testing.assert_close(loss[start : start + n], passed["pg_loss"][start : start + n] * want)
        assert mask.tolist() == kept.tolist()
        start += n
    assert all(value.shape == loss.shape for value in metrics.values())
    loss.sum().backward()
    assert torch.isfinite(passed["pg_loss"].grad).all()


def test_a_rejected_response_takes_no_loss_even_an_infinite_one():
    infinite = torch.full((sum(LENGTHS),), float("inf"))
    (loss, masks, metrics), passed = call('{"preset": "Veto", "low": 1e9, "high": 1e12}', pg_loss=infinite)
    assert (loss == 0).all()
    assert all(mask.sum() == 0 for mask in masks)
    assert metrics["mismatch_rejected"].sum() == sum(int(mask.sum()) for mask in passed["loss_masks"])


@pytest.mark.parametrize(
    ("rule", "words"),
    [
        ("dlc", "centres the score"),
        ("opsm", "looks at the advantage"),
        ("dppo", "looks at the advantage"),
        ('{"preset": "Truncate", "on": "lag"}', "no logp_sync"),
    ],
)
def test_what_the_hook_cannot_express_is_refused(rule: str, words: str):
    with pytest.raises(BadInput, match=words):
        call(rule)


def test_shards_of_context_parallelism_are_refused():
    with pytest.raises(BadInput, match="context parallelism"):
        call("tis", loss_masks=[torch.ones(n + 1) for n in LENGTHS])


def test_the_example_names_this_function_and_a_rule_it_can_express():
    folder = Path("realmodel/adapters/examples")
    assert f"--custom-tis-function-path {tis.__module__}.{tis.__name__}\n" in (folder / "slime.sh").read_text()
    call(yaml.safe_load((folder / "slime.yaml").read_text())["mismatch_correction"])
