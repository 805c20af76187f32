"""Chunked log-probabilities against the whole table: values, gradients, snapshots, bfloat16, and their peak memory."""

import pytest
import torch

from benchmarks import memory
from realmodel.policy import logprobs
from realmodel.policy import model as policy
from realmodel.policy.logprobs import _Columns, log_probs_at, pieces
from sandbox.errors import BadInput
from tests.support.tiny_model import untrained

IDS = torch.randint(2, 64, (3, 9), generator=torch.Generator().manual_seed(0))
ROWS = torch.tensor([2, 7, 9, 16, 20, 21, 25])  # flat b L + i, ragged: 2, 2 and 3 rows of the three sequences
TOKENS = IDS.flatten()[ROWS + 1]
TOP = torch.stack([torch.randperm(64, generator=torch.Generator().manual_seed(i))[:5] for i in range(7)])
TOP[3, 2] = TOKENS[3]  # the drawn token is often among the top k: both places must get their gradient
TINY_CHUNK = 64 * 4 * 2 / 2**20  # two rows at once: 7 rows are four pieces, the last one short


def plain(model, columns, weights=None):
    return policy.log_probs(model, IDS, None, weights).flatten(0, 1)[ROWS].gather(-1, columns)


def gradients(model, logp):
    """Of an asymmetric sum in which no two numbers weigh alike."""
    model.zero_grad()
    (logp * torch.randn(logp.shape, generator=torch.Generator().manual_seed(5))).sum().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("columns", [TOKENS[:, None], torch.cat([TOKENS[:, None], TOP], dim=1)])
@pytest.mark.parametrize("chunk_mib", [TINY_CHUNK, 5 * TINY_CHUNK])
def test_values_and_gradients_are_those_of_the_whole_table(columns, chunk_mib):
    model = untrained()
    want = plain(model, columns)
    expected = gradients(model, want)
    got = log_probs_at(model, IDS, ROWS, columns, chunk_mib=chunk_mib)
    torch.testing.assert_close(got, want, atol=2e-6, rtol=1e-5)
    assert columns.shape[1] == 1 or torch.equal(got[3, 0], got[3, 3])  # the drawn token, and it again
    actual = gradients(model, got)
    assert max(float(g.abs().max()) for g in expected.values()) > 0.1
    for name, gradient in expected.items():
        torch.testing.assert_close(actual[name], gradient, atol=1e-5, rtol=1e-4, msg=name)


def test_a_table_that_fits_is_bitwise_the_whole_one():
    model = untrained()
    assert torch.equal(log_probs_at(model, IDS, ROWS, TOP), plain(model, TOP))


def test_columns_by_finite_differences():
    """The autograd rule alone: central differences in every entry of hidden states and matrix."""
    g = torch.Generator().manual_seed(1)
    hidden, matrix = torch.randn(3, 4, generator=g), torch.randn(6, 4, generator=g)
    columns, weigh = torch.tensor([[5, 0], [2, 2], [1, 4]]), torch.randn(3, 2, generator=g)

    def value(h, m):
        return float((_Columns.apply(h, m, columns, 2) * weigh).double().sum())

    inputs = hidden.clone().requires_grad_(), matrix.clone().requires_grad_()
    (_Columns.apply(*inputs, columns, 2) * weigh).sum().backward()
    for which, tensor in enumerate((hidden, matrix)):
        for index in torch.cartesian_prod(*map(torch.arange, tensor.shape)).tolist():
            ends = []
            for sign in (1, -1):
                moved = [hidden.clone(), matrix.clone()]
                moved[which][tuple(index)] += sign * 0.01
                ends.append(value(*moved))
            assert inputs[which].grad[tuple(index)].item() == pytest.approx((ends[0] - ends[1]) / 0.02, abs=2e-3)


def test_a_snapshot_is_evaluated_without_gradient_and_borrows_nothing(monkeypatch):
    monkeypatch.setattr(logprobs, "POSITIONS", 18)  # two sequences of nine at once, then one
    model = untrained()
    weights = policy.snapshot(model)
    want = plain(model, TOP)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.1)
    got = log_probs_at(model, IDS, ROWS, TOP, weights, TINY_CHUNK)
    torch.testing.assert_close(got, want.detach(), atol=2e-6, rtol=1e-5)
    assert not got.requires_grad
    live = log_probs_at(model, IDS, ROWS, TOP, chunk_mib=TINY_CHUNK)
    torch.testing.assert_close(live, plain(model, TOP), atol=2e-6, rtol=1e-5)
    assert (live - got).abs().max() > 1e-3


def test_products_in_bfloat16_leave_float32_weights_and_gradients():
    """To the rounding of bfloat16 logits, chunked and whole alike."""
    model, exact = untrained(), untrained()
    model.autocast_dtype = torch.bfloat16
    columns = torch.cat([TOKENS[:, None], TOP], dim=1)
    want, whole = plain(exact, columns), log_probs_at(model, IDS, ROWS, columns)
    got = log_probs_at(model, IDS, ROWS, columns, chunk_mib=TINY_CHUNK)
    assert got.dtype == whole.dtype == torch.float32
    assert 1e-5 < (whole - want).abs().max() < 0.06
    torch.testing.assert_close(got, whole, atol=0.02, rtol=0)
    expected, actual = gradients(exact, want), gradients(model, got)
    for name, gradient in actual.items():
        assert gradient.dtype == torch.float32
        assert (gradient - expected[name]).norm() < 0.05 * expected[name].norm(), name


def test_an_output_layer_with_a_bias_is_refused():
    model = untrained()
    model.lm_head = torch.nn.Linear(64, 64, bias=True)
    with pytest.raises(BadInput, match="output layer has a bias"):
        log_probs_at(model, IDS, ROWS, TOP, chunk_mib=TINY_CHUNK)


def test_pieces():
    assert list(pieces(5, 2)) == [slice(0, 2), slice(2, 4), slice(4, 5)]
    assert list(pieces(5, 0)) == [slice(0, 5)]
    assert not list(pieces(0, 0))


def test_peak_memory_grows_by_the_chunk_not_by_the_rows():
    """V = 40,000, 1,024 rows: the logits alone are 156 MiB, in a process of its own above its own baseline."""
    assert memory.peak_mib(vocabulary=40_000, hidden=64, rows=1024, chunk_mib=8) < 100
    assert memory.peak_mib(vocabulary=40_000, hidden=64, rows=1024, chunk_mib=8, plain=True) > 156
