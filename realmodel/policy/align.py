"""Rollout -> sandbox Batch. Every shift, mask and version check between sampler and trainer is in this file.

The sampler reports one log-probability for each drawn token of a response. The trainer works on whole sequences: row i
of its output predicts token i + 1. So row P - 1 + t predicts token t of a response to a prompt of P tokens. Sequences
are padded on the right, where causal attention keeps the padding out of every counted row.
"""

from dataclasses import dataclass, fields, replace
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from sandbox.batch import Batch, check
from sandbox.errors import BadInput

WHOLE = -1  # for a number of tokens: the whole vocabulary


@dataclass(frozen=True, eq=False)
class Rollout:
    """B responses as the sampler drew them.

    Args:
        prompt_ids: the prompt of each response. B lists
        response_ids: drawn tokens, eos included where it was drawn. B lists
        logp: the sampler's log-probability of each drawn token, nats. B arrays (T_i,)
        logp_all: the same over the whole vocabulary, in token-id order, or over the tokens of `top_ids`; None where not
            asked for. B arrays (T_i, V) or (T_i, k)
        version: weight version that drew them; where several did, the last.
        prompt_index: which prompt of the request each response answers. int (B,)
        finished: whether eos was drawn (else the length limit cut the response). bool (B,)
        token_versions: weight version of each token, where a sync fell into the generation. B int arrays (T_i,)
        width: length to which `pad` pads every sequence; 0: that of the longest. The exact engine draws its tokens
            and the trainer evaluates them in this one shape.
        top_ids: the likeliest k tokens at each place, likeliest first, whose log-probabilities `logp_all` holds; None
            where it holds all. B int arrays (T_i, k)
    """

    prompt_ids: list[list[int]]
    response_ids: list[list[int]]
    logp: list[np.ndarray]
    logp_all: list[np.ndarray] | None
    version: int
    prompt_index: np.ndarray
    finished: np.ndarray
    token_versions: list[np.ndarray] | None = None
    width: int = 0
    top_ids: list[np.ndarray] | None = None

    def versions(self) -> list[np.ndarray]:
        """The weight version that drew each token. B int arrays (T_i,)"""
        if self.token_versions is not None:
            return self.token_versions
        return [np.full(len(ids), self.version) for ids in self.response_ids]

    @property
    def top(self) -> int:
        """How many log-probabilities it has of each place besides the drawn token's: 0, k, or WHOLE."""
        if self.logp_all is None:
            return 0
        return WHOLE if self.top_ids is None else self.top_ids[0].shape[-1]


def pad(rollout: Rollout, pad_id: int) -> tuple[Tensor, Tensor]:
    """Prompt and response of each row as one sequence, padded on the right.

    Returns:
        (ids, attention_mask), both long (B, L); the mask is 1 on real tokens.
    """
    return pad_ids(_sequences(rollout), pad_id, rollout.width)


def _sequences(rollout: Rollout) -> list[list[int]]:
    return [p + r for p, r in zip(rollout.prompt_ids, rollout.response_ids, strict=True)]


def pad_ids(sequences: list[list[int]], pad_id: int, width: int = 0) -> tuple[Tensor, Tensor]:
    """Ragged id lists as (ids, attention_mask), both long (B, L), padded on the right to `width` or the longest.

    Raises BadInput if empty.
    """
    if not sequences or not all(sequences):
        raise BadInput("ids: no sequence, or one without a token")
    length = max(width, *map(len, sequences))
    ids = torch.tensor([s + [pad_id] * (length - len(s)) for s in sequences])
    mask = torch.tensor([[1] * len(s) + [0] * (length - len(s)) for s in sequences])
    return ids, mask


def predicted_by(rollout: Rollout) -> tuple[Tensor, Tensor, Tensor]:
    """Where the trainer predicts each response token, and which token it was.

    Returns:
        rows: sequence position whose output predicts response token t; 0 where masked. long (B, T)
        tokens: the drawn token; 0 where masked. long (B, T)
        mask: True on response tokens. bool (B, T)

    Raises BadInput: naming the row of an empty prompt or response.
    """
    for b, (prompt, response) in enumerate(zip(rollout.prompt_ids, rollout.response_ids, strict=True)):
        if not prompt or not response:
            raise BadInput(f"{'response' if prompt else 'prompt'}_ids[{b}] is empty")
    before, counts = (torch.tensor(list(map(len, ids))) for ids in (rollout.prompt_ids, rollout.response_ids))
    place = torch.arange(max(counts.tolist(), default=0))
    mask = place < counts[:, None]
    rows = torch.where(mask, before[:, None] - 1 + place, 0)
    tokens = torch.zeros_like(rows)
    tokens[mask] = torch.tensor(list(chain(*rollout.response_ids)), dtype=torch.long)
    return rows, tokens, mask


def wanted(rollout: Rollout, length: int, vocabulary: int, centre: bool) -> tuple[Tensor, Tensor]:
    """What the trainer is asked about a rollout (`logprobs.log_probs_at`).

    Args:
        length: of the padded sequences, L.
        vocabulary: tokens the trainer's model has, V.
        centre: ask about the tokens of `logp_all` too, for corrections that centre the score.

    Returns:
        rows: flat positions b L + i that predict the response tokens, in order. long (N,)
        columns: the drawn token, then the others. long (N, 1), (N, 1 + k) or (N, 1 + V)

    Raises BadInput: naming the row of an empty prompt or response; log-probabilities that the sampler was not asked
    for.
    """
    rows, tokens, mask = predicted_by(rollout)
    flat = (rows + length * torch.arange(len(rows))[:, None])[mask]
    columns = tokens[mask][:, None]
    if not centre:
        return flat, columns
    if rollout.logp_all is None:
        raise BadInput("logp_all is missing: sample with top = WHOLE, or the top k, to centre the score")
    if rollout.top_ids is None:
        others = torch.arange(vocabulary).expand(len(flat), -1)
    else:
        others = torch.from_numpy(np.concatenate(rollout.top_ids))
    return flat, torch.cat([columns, others], dim=1)


def to_batch(
    rollout: Rollout,
    ids: Tensor,
    advantage: Tensor | np.ndarray,
    train: Tensor,
    version_train: int,
    sync: Tensor | None = None,
    centre: bool = False,
) -> Batch:
    """The Batch of a rollout and the trainer's log-probabilities on it.

    `logp_old` is left out: at the start of a batch it is `logp_train` without its gradient.

    Args:
        rollout: what the sampler drew, B responses of up to T tokens.
        ids: the padded sequences that the trainer evaluated, as `pad` gave them. (B, L)
        advantage: one number a response. (B,)
        train: log pi of what `wanted` asks; carries the gradient. (N, c)
        version_train: weight version of the trainer that consumes the batch.
        sync: log mu of the same, the trainer's engine at the weights that drew each token. (N, c)
        centre: also fill the fields over several tokens, for corrections that centre the score.

    Raises BadInput: naming the field, for ids that are not the rollout's, lengths or shapes that disagree, empty
    responses, sampler log-probabilities that are missing, nan, -inf or above 0, and a version newer than the trainer's.
    """
    _, _, mask = predicted_by(rollout)
    size, width = mask.shape
    _check_sizes(rollout, ids)
    others = 0
    if centre:
        others = train.shape[-1] - 1
        for b, (rows, response) in enumerate(zip(_vocabulary(rollout), rollout.response_ids, strict=True)):
            if rows.shape != (len(response), others):
                raise BadInput(f"logp_all[{b}] has shape {rows.shape}, expected ({len(response)}, {others})")
    for name, table in (("train", train), ("sync", sync)):
        if table is not None and table.shape != (int(mask.sum()), 1 + others):
            raise BadInput(f"{name} has shape {tuple(table.shape)}, expected ({int(mask.sum())}, {1 + others})")
    if np.shape(advantage) != (size,):
        raise BadInput(f"advantage has shape {tuple(np.shape(advantage))}, expected ({size},)")
    device = train.device
    mask = mask.to(device)

    def reported(rows: list[np.ndarray]) -> Tensor:
        return spread(torch.as_tensor(np.concatenate(rows), dtype=torch.float32, device=device), mask)

    return check(
        Batch(
            **trainers(train, mask, centre),
            logp_rollout=reported(rollout.logp),
            mask=mask,
            advantage=torch.as_tensor(advantage, dtype=train.dtype, device=device)[:, None],
            logp_sync=None if sync is None else spread(sync[:, 0], mask),
            logp_sync_all=spread(sync[:, 1:], mask) if centre and sync is not None else None,
            logp_rollout_all=reported(_vocabulary(rollout)) if centre else None,
            version_rollout=_version_rollout(rollout, width).to(device),
            version_train=version_train,
        )
    )


def trainers(train: Tensor, mask: Tensor, centre: bool) -> dict[str, Tensor]:
    """The fields of a Batch that hold log pi, from what `wanted` asked. (N, c), (B, T)"""
    drawn = {"logp_train": spread(train[:, 0], mask)}
    return drawn | ({"logp_train_all": spread(train[:, 1:], mask)} if centre else {})


def spread(values: Tensor, mask: Tensor) -> Tensor:
    """Values of the counted places on those places, 0 elsewhere; a gradient passes. (N, ...), (B, T) -> (B, T, ...)"""
    table = torch.zeros(*mask.shape, *values.shape[1:], dtype=values.dtype, device=values.device)
    return table.index_put((mask,), values)


def part(rollout: Rollout, piece: slice) -> Rollout:
    """Those responses alone."""
    values: dict[str, Any] = {f.name: getattr(rollout, f.name) for f in fields(rollout)}
    cut: dict[str, Any] = {name: v[piece] for name, v in values.items() if isinstance(v, list | np.ndarray)}
    return replace(rollout, **cut)


def _version_rollout(rollout: Rollout, width: int) -> Tensor:
    """One version a response, (B, 1); one a token, (B, T), where a sync fell into the generation."""
    if rollout.token_versions is None:
        return torch.full((len(rollout.response_ids), 1), rollout.version)
    versions = torch.zeros(len(rollout.response_ids), width, dtype=torch.long)
    for b, row in enumerate(rollout.token_versions):
        versions[b, : len(row)] = torch.as_tensor(row)
    return versions


def _check_sizes(rollout: Rollout, ids: Tensor) -> None:
    size = len(rollout.response_ids)
    if len(rollout.logp) != size:
        raise BadInput(f"logp has {len(rollout.logp)} rows for {size} responses")
    if ids.ndim != 2 or len(ids) != size:
        raise BadInput(f"ids has shape {tuple(ids.shape)}, expected ({size}, L)")
    for b, (response, logp) in enumerate(zip(rollout.response_ids, rollout.logp, strict=True)):
        if logp is None or np.asarray(logp).dtype == object:
            raise BadInput(f"logp[{b}] is missing: the sampler reported no log-probability")
        if np.shape(logp) != (len(response),):
            raise BadInput(f"logp[{b}] has shape {np.shape(logp)} for a response of {len(response)} tokens")
    own, real = pad_ids(_sequences(rollout), 0)
    seen = ids.cpu()[:, : own.shape[1]]
    wrong = (own != nn.functional.pad(seen, (0, own.shape[1] - seen.shape[1]), value=-1)) & (real == 1)
    if wrong.any():
        raise BadInput(f"ids[{int(wrong.any(1).int().argmax())}] is not the prompt and response of the rollout")


def _vocabulary(rollout: Rollout) -> list[np.ndarray]:
    if rollout.logp_all is None:
        raise BadInput("logp_all is missing: sample with top = WHOLE, or the top k, to centre the score")
    return rollout.logp_all
