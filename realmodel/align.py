"""Rollout -> sandbox Batch: every shift, mask and version check between sampler and trainer stands here.

The sampler speaks of responses (its log-probability of each drawn token); the trainer of whole sequences, where row i
of its output predicts token i + 1. Token t of a response to a prompt of P tokens is therefore predicted by row
P - 1 + t. Sequences are padded on the right, where causal attention keeps padding out of every counted row.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from sandbox.batch import Batch, check
from sandbox.errors import BadInput


@dataclass(frozen=True, eq=False)
class Rollout:
    """B responses as the sampler drew them.

    Args:
        prompt_ids: the prompt of each response. B lists
        response_ids: drawn tokens, eos included where it was drawn. B lists
        logp: the sampler's log-probability of each drawn token, nats. B arrays (T_i,)
        logp_all: the same over the whole vocabulary, in token-id order; None where not asked for. B arrays (T_i, V)
        version: weight version that drew them; where several did, the last.
        prompt_index: which prompt of the request each response answers. int (B,)
        finished: whether eos was drawn (else the length limit cut the response). bool (B,)
        token_versions: weight version of each token, where a sync fell into the generation. B int arrays (T_i,)
        width: length to which `pad` pads every sequence; 0: that of the longest. The exact engine draws its tokens
            and the trainer evaluates them in this one shape.
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

    def versions(self) -> list[np.ndarray]:
        """The weight version that drew each token. B int arrays (T_i,)"""
        if self.token_versions is not None:
            return self.token_versions
        return [np.full(len(ids), self.version) for ids in self.response_ids]


def pad(rollout: Rollout, pad_id: int) -> tuple[Tensor, Tensor]:
    """Prompt and response of each row as one sequence, padded on the right.

    Returns:
        (ids, attention_mask), both long (B, L); the mask is 1 on real tokens.
    """
    sequences = [p + r for p, r in zip(rollout.prompt_ids, rollout.response_ids, strict=True)]
    return pad_ids(sequences, pad_id, rollout.width)


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

    Raises:
        BadInput: naming the row of an empty prompt or response.
    """
    size, width = len(rollout.response_ids), max(map(len, rollout.response_ids), default=0)
    rows = torch.zeros(size, width, dtype=torch.long)
    tokens = torch.zeros_like(rows)
    mask = torch.zeros(size, width, dtype=torch.bool)
    for b, (prompt, response) in enumerate(zip(rollout.prompt_ids, rollout.response_ids, strict=True)):
        if not prompt or not response:
            raise BadInput(f"{'response' if prompt else 'prompt'}_ids[{b}] is empty")
        n = len(response)
        rows[b, :n] = torch.arange(len(prompt) - 1, len(prompt) - 1 + n)
        tokens[b, :n] = torch.tensor(response)
        mask[b, :n] = True
    return rows, tokens, mask


def to_batch(
    rollout: Rollout,
    ids: Tensor,
    advantage: Tensor | np.ndarray,
    train_all: Tensor,
    version_train: int,
    sync_all: Tensor | None = None,
    centre: bool = False,
) -> Batch:
    """The Batch of a rollout and the trainer's log-probabilities on it.

    `logp_old` is left out: at the start of a batch it is `logp_train` without its gradient.

    Args:
        rollout: what the sampler drew, B responses of up to T tokens.
        ids: the padded sequences that the trainer evaluated, as `pad` gave them. (B, L)
        advantage: one number a response. (B,)
        train_all: log pi of every next token, from `model.log_probs`; carries the gradient. (B, L, V)
        version_train: weight version of the trainer that consumes the batch.
        sync_all: log mu, the trainer's engine at the weights that drew each token. (B, L, V)
        centre: also fill the whole-vocabulary fields, for corrections that centre the score.

    Raises:
        BadInput: naming the field, for ids that are not the rollout's, lengths or shapes that disagree, empty
            responses, sampler log-probabilities that are missing, nan, -inf or above 0, and a version newer than the
            trainer's.
    """
    rows, tokens, mask = predicted_by(rollout)
    size, width = tokens.shape
    _check_sizes(rollout, ids, train_all)
    if sync_all is not None and sync_all.shape != train_all.shape:
        raise BadInput(f"sync_all has shape {tuple(sync_all.shape)}, train_all {tuple(train_all.shape)}")
    if np.shape(advantage) != (size,):
        raise BadInput(f"advantage has shape {tuple(np.shape(advantage))}, expected ({size},)")
    device = train_all.device
    rows, tokens, mask = rows.to(device), tokens.to(device), mask.to(device)

    def response_rows(whole: Tensor) -> Tensor:  # (B, L, V) -> (B, T, V)
        return whole[torch.arange(size, device=device)[:, None], rows]

    def drawn(whole: Tensor) -> Tensor:  # (B, L, V) -> (B, T)
        return whole[torch.arange(size, device=device)[:, None], rows, tokens]

    rollout_all = None
    if centre:
        vocabulary = train_all.shape[-1]
        for b, (rows_all, response) in enumerate(zip(_vocabulary(rollout), rollout.response_ids, strict=True)):
            if rows_all.shape != (len(response), vocabulary):
                raise BadInput(f"logp_all[{b}] has shape {rows_all.shape}, expected ({len(response)}, {vocabulary})")
        rollout_all = torch.zeros(size, width, vocabulary, device=device)
        rollout_all[mask] = torch.as_tensor(np.concatenate(_vocabulary(rollout)), dtype=torch.float32, device=device)
    logp_rollout = torch.zeros(size, width, device=device)
    logp_rollout[mask] = torch.as_tensor(np.concatenate(rollout.logp), dtype=torch.float32, device=device)
    return check(
        Batch(
            logp_train=drawn(train_all),
            logp_rollout=logp_rollout,
            mask=mask,
            advantage=torch.as_tensor(advantage, dtype=train_all.dtype, device=device)[:, None],
            logp_sync=None if sync_all is None else drawn(sync_all),
            logp_train_all=response_rows(train_all) if centre else None,
            logp_sync_all=response_rows(sync_all) if centre and sync_all is not None else None,
            logp_rollout_all=rollout_all,
            version_rollout=_version_rollout(rollout, width).to(device),
            version_train=version_train,
        )
    )


def _version_rollout(rollout: Rollout, width: int) -> Tensor:
    """One version a response, (B, 1); one a token, (B, T), where a sync fell into the generation."""
    if rollout.token_versions is None:
        return torch.full((len(rollout.response_ids), 1), rollout.version)
    versions = torch.zeros(len(rollout.response_ids), width, dtype=torch.long)
    for b, row in enumerate(rollout.token_versions):
        versions[b, : len(row)] = torch.as_tensor(row)
    return versions


def _check_sizes(rollout: Rollout, ids: Tensor, train_all: Tensor) -> None:
    size = len(rollout.response_ids)
    if len(rollout.logp) != size:
        raise BadInput(f"logp has {len(rollout.logp)} rows for {size} responses")
    if ids.ndim != 2 or len(ids) != size:
        raise BadInput(f"ids has shape {tuple(ids.shape)}, expected ({size}, L)")
    if train_all.shape[:2] != ids.shape:
        raise BadInput(f"train_all has shape {tuple(train_all.shape)}, expected ({size}, {ids.shape[1]}, V)")
    for b, (prompt, response, logp) in enumerate(
        zip(rollout.prompt_ids, rollout.response_ids, rollout.logp, strict=True)
    ):
        if ids[b, : len(prompt) + len(response)].tolist() != prompt + response:
            raise BadInput(f"ids[{b}] is not the prompt and response of the rollout")
        if logp is None or np.asarray(logp).dtype == object:
            raise BadInput(f"logp[{b}] is missing: the sampler reported no log-probability")
        if np.shape(logp) != (len(response),):
            raise BadInput(f"logp[{b}] has shape {np.shape(logp)} for a response of {len(response)} tokens")


def _vocabulary(rollout: Rollout) -> list[np.ndarray]:
    if rollout.logp_all is None:
        raise BadInput("logp_all is missing: sample with whole_vocabulary=True to centre the score")
    return rollout.logp_all
