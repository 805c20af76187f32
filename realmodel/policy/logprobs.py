"""Log-probabilities by the trainer's engine, at its own weights or at a snapshot of earlier ones.

`log_probs` is the whole table, every next token at every position. `log_probs_at` is what training asks for: chosen
tokens at the rows that predict a response. Where the table is small the two are bitwise the same, which the exact
sampler relies on. Where it is not (at V = 151,936 the logits of [8, 1024] tokens are 4.6 GiB in float32, and autograd
keeps several copies) the hidden states of the wanted rows alone, prompts and padding left out, go through the output
layer a few rows at a time, and the backward pass computes each piece's logits again.
"""

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from sandbox.errors import BadInput

CHUNK_MIB = 64  # of float32 logits at once; about three such arrays live at the peak
POSITIONS = 16384  # tokens that go through the model at once where no gradient is wanted
IN_CACHE = 4096  # the same for a small model: its activations then stay in a core's cache, and memory is used again


def log_probs(
    model: nn.Module, ids: Tensor, attention_mask: Tensor | None, weights: dict[str, Tensor] | None = None
) -> Tensor:
    """log-probability of every next token at every position, nats.

    Args:
        ids: padded on the right. long (B, L)
        attention_mask: 1 on real tokens; None where nothing is padded. (B, L)
        weights: evaluate at this snapshot instead of the live weights, without gradient.

    Returns:
        float32 (B, L, V); row i predicts token i + 1.
    """
    device = next(model.parameters()).device
    mask = None if attention_mask is None else attention_mask.to(device)
    inputs = {"input_ids": ids.to(device), "attention_mask": mask, "use_cache": False}
    with torch.no_grad() if weights is not None else nullcontext(), precision(model):
        output = model(**inputs) if weights is None else torch.func.functional_call(model, weights, (), inputs)
        return output.logits.float().log_softmax(-1)


def log_probs_at(
    model: Any,
    ids: Tensor,
    rows: Tensor,
    columns: Tensor,
    weights: dict[str, Tensor] | None = None,
    chunk_mib: float = CHUNK_MIB,
) -> Tensor:
    """log softmax(logits) at chosen rows and tokens, nats.

    Args:
        model: a causal language model of transformers.
        ids: padded on the right, so that no wanted row sees padding. long (B, L)
        rows: which row of which sequence predicts, as flat positions b L + i, ascending. long (N,)
        columns: the tokens each is asked about. long (N, c)
        weights: evaluate at this snapshot (`model.snapshot`) instead of the live weights, without gradient.
        chunk_mib: float32 logits held at once, MiB.

    Returns:
        float32 (N, c)

    Raises BadInput: an output layer with a bias, where the table is too large to be made at once.
    """
    head = model.get_output_embeddings()
    device, size = head.weight.device, ids.shape[1]
    rows, columns = rows.to(device), columns.to(device)
    if ids.numel() * len(head.weight) * 4 <= chunk_mib * 2**20:
        return log_probs(model, ids, None, weights).flatten(0, 1)[rows].gather(-1, columns)
    if head.bias is not None:
        raise BadInput("the model's output layer has a bias, which chunked log-probabilities do not add")
    step = max(1, int(chunk_mib * 2**20 / (4 * len(head.weight))))
    with torch.no_grad() if weights is not None else nullcontext(), precision(model):
        matrix = head.weight if weights is None else weights["lm_head.weight"]
        hidden = []
        at_once = len(ids) if torch.is_grad_enabled() else max(1, POSITIONS // size)
        for piece in pieces(len(ids), at_once):
            here = rows[(rows >= piece.start * size) & (rows < piece.stop * size)] - piece.start * size
            hidden.append(_last_hidden(model, ids[piece].to(device), weights).flatten(0, 1)[here])
        wanted: Any = _Columns.apply(torch.cat(hidden), matrix, columns, step)
        return wanted


@torch.no_grad()
def log_probs_of_many(model: Any, ids: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """`log_probs_at` the live weights without a gradient, a few sequences at a time; its arguments. (N, c)

    Twice as fast on a thousand responses of the small model. Rounding may differ from that of all at once, so the exact
    engine's bitwise comparison keeps to `log_probs_at`.
    """
    size, found = ids.shape[1], []
    for piece in pieces(len(ids), max(1, IN_CACHE // size)):
        here = (rows >= piece.start * size) & (rows < piece.stop * size)
        found.append(log_probs_at(model, ids[piece], rows[here] - piece.start * size, columns[here]))
    return torch.cat(found)


def _last_hidden(model: Any, ids: Tensor, weights: dict[str, Tensor] | None) -> Tensor:
    inputs = {"input_ids": ids, "use_cache": False}
    if weights is None:
        return model.base_model(**inputs).last_hidden_state
    prefix = model.base_model_prefix + "."
    inner = {name.removeprefix(prefix): w for name, w in weights.items() if name.startswith(prefix)}
    return torch.func.functional_call(model.base_model, inner, (), inputs).last_hidden_state


def precision(model: nn.Module) -> Any:
    """The context of a forward pass: matrix products in bfloat16 where `settings.learner` marked the model so."""
    dtype = getattr(model, "autocast_dtype", None)
    return torch.autocast(next(model.parameters()).device.type, dtype) if dtype else nullcontext()


def pieces(n: int, size: int) -> Iterator[slice]:
    """Consecutive slices of n things, at most `size` each; 0: all at once."""
    return (slice(start, min(start + (size or n), n)) for start in range(0, n, size or max(n, 1)))


class _Columns(torch.autograd.Function):
    """log softmax(hidden matrix^T) at chosen columns. (N, H), (V, H), long (N, c) -> float32 (N, c)

    d logp(a) / d logits = onehot(a) - p, so a row's logits get scatter(g) - p sum g. The gradient of the matrix is
    added up in float32 in place: one array of its size, not one a piece.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, matrix: Tensor, columns: Tensor, step: int) -> Tensor:
        if torch.is_autocast_enabled(hidden.device.type):  # its backward pass would not be
            dtype = torch.get_autocast_dtype(hidden.device.type)
            ctx.dtypes, hidden, matrix = (hidden.dtype, matrix.dtype), hidden.to(dtype), matrix.to(dtype)
        else:
            ctx.dtypes = hidden.dtype, matrix.dtype
        normaliser = torch.empty(len(hidden), 1, dtype=torch.float32, device=hidden.device)
        out = torch.empty(columns.shape, dtype=torch.float32, device=hidden.device)
        for piece in pieces(len(hidden), step):
            logits = (hidden[piece] @ matrix.T).float()
            torch.logsumexp(logits, -1, keepdim=True, out=normaliser[piece])
            torch.sub(logits.gather(-1, columns[piece]), normaliser[piece], out=out[piece])
        ctx.save_for_backward(hidden, matrix, columns, normaliser)
        ctx.step = step
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        hidden, matrix, columns, normaliser = ctx.saved_tensors
        (gradient,) = gradients
        to_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        to_matrix = torch.zeros(matrix.shape, device=matrix.device) if ctx.needs_input_grad[1] else None
        for piece in pieces(len(hidden), ctx.step):
            g = gradient[piece]
            d = (hidden[piece] @ matrix.T).float().sub_(normaliser[piece]).exp_()
            d.mul_(-g.sum(-1, keepdim=True)).scatter_add_(-1, columns[piece], g)
            if to_hidden is not None:
                to_hidden[piece] = d.to(matrix.dtype) @ matrix
            if to_matrix is not None:
                to_matrix.addmm_(d.T, hidden[piece].float())
        to_hidden = None if to_hidden is None else to_hidden.to(ctx.dtypes[0])
        return to_hidden, None if to_matrix is None else to_matrix.to(ctx.dtypes[1]), None, None
