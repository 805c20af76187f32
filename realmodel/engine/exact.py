"""The exact engine: it samples with the trainer's own kernels, so its log-probabilities equal the trainer's bit by bit.

Every forward pass has one shape, the trainer's included: all responses of the batch, padded on the right to the length
that they may reach. A row of a causal model then depends only on the tokens before it, to the last bit. What a token
was drawn from is what the trainer computes for it, so d is exactly 0.0. `extend` checks this for every token it draws
and refuses a model where it does not hold. The exact engine stands for the bitwise-consistent engines of the
literature (VeXact; vLLM with TorchTitan). Each token costs a pass over all sequences, so it is for small models.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from realmodel.policy import model as policy
from realmodel.policy.align import WHOLE, Rollout, pad
from realmodel.policy.logprobs import log_probs
from sandbox.errors import BadInput


@dataclass(frozen=True, eq=False)
class ExactEngine:
    """A copy of the trainer's model that keeps the weights of the last sync.

    Args:
        model, pad_id: as `model.load` gives them.
        max_model_len: tokens of prompt and response together.
        vocabulary: token ids it can draw, V.
        offset: constant discrepancy added to the logits, nats; None is no discrepancy. (V,)
    """

    model: Any
    pad_id: int
    max_model_len: int
    vocabulary: int
    offset: Tensor | None = None

    def log_q(self, ids: Tensor) -> Tensor:
        """log q of every next token, float32 (B, L, V)."""
        logp = log_probs(self.model, ids, None)
        return logp if self.offset is None else (logp + self.offset).log_softmax(-1)


def start(path: str | Path, max_model_len: int, offset: Callable[[int], np.ndarray]) -> ExactEngine:
    """The engine with the weights of a folder; `offset` is given V and returns (V,)."""
    model, tokenizer = policy.load(path)
    table = torch.from_numpy(offset(model.config.vocab_size)).to(model.device)
    return ExactEngine(
        model, tokenizer.pad_token_id or 0, max_model_len, len(table), table if bool(table.any()) else None
    )


def eos_ids(config: Any) -> set[int]:
    """The token ids that end a response, from a model's config."""
    eos = config.eos_token_id
    return set(eos) if isinstance(eos, list) else {eos}


def generate(
    engine: ExactEngine, prompt_ids: list[list[int]], n: int, max_new_tokens: int, seed: int, top: int,
    version: int, room: int,
) -> Rollout:  # fmt: skip
    """As `sampler.generate`, which checks the prompts."""
    prompts = [list(p) for p in prompt_ids for _ in range(n)]
    vocabulary = engine.vocabulary
    nothing = Rollout(
        prompt_ids=prompts,
        response_ids=[[] for _ in prompts],
        logp=[np.empty(0, np.float32) for _ in prompts],
        logp_all=[np.empty((0, vocabulary if top == WHOLE else top), np.float32) for _ in prompts] if top else None,
        top_ids=[np.empty((0, top), np.int64) for _ in prompts] if top > 0 else None,
        version=version,
        prompt_index=np.repeat(np.arange(len(prompt_ids)), n),
        finished=np.zeros(len(prompts), bool),
        width=max(map(len, prompts)) + max_new_tokens + room,
    )
    return replace(extend(engine, nothing, max_new_tokens, seed, version), token_versions=None)


@torch.no_grad()
def extend(engine: ExactEngine, rollout: Rollout, max_new_tokens: int, seed: int, version: int) -> Rollout:
    """As `sampler.extend`.

    Raises BadInput: where the trainer's kernels give a token another log-probability than when it was drawn, because
    later tokens of the batch change it (the experts' batches of a mixture of experts, for one).
    """
    device = engine.model.device
    generator = torch.Generator(device).manual_seed(seed)
    ids = pad(rollout, engine.pad_id)[0].to(device)
    row = torch.arange(len(ids), device=device)
    begin = torch.tensor([len(p) + len(r) for p, r in zip(rollout.prompt_ids, rollout.response_ids, strict=True)])
    begin = begin.to(device)
    length, alive = begin.clone(), torch.from_numpy(~rollout.finished).to(device)
    eos = torch.tensor(sorted(eos_ids(engine.model.config)), device=device)
    drawn_from = torch.zeros(len(ids), max_new_tokens, device=device)
    for step in range(max_new_tokens):
        if not alive.any():
            break
        logp = engine.log_q(ids)[row, length - 1]
        token = torch.multinomial(logp.exp(), 1, generator=generator)
        drawn_from[:, step] = logp.gather(-1, token)[:, 0]
        ids[row[alive], length[alive]] = token[alive, 0]
        length += alive
        alive = alive & ~torch.isin(token[:, 0], eos)
    whole = engine.log_q(ids)
    responses, logp, everything, likeliest, versions = [], [], [], [], []
    drew = rollout.versions()
    for b, (prompt, old) in enumerate(zip(rollout.prompt_ids, rollout.response_ids, strict=True)):
        first, last = int(begin[b]), int(length[b])
        rows = whole[b, first - 1 : last - 1]
        values = rows.gather(-1, ids[b, first:last, None])[:, 0]
        if not torch.equal(values, drawn_from[b, : last - first]):
            worst = float((values - drawn_from[b, : last - first]).abs().max())
            raise BadInput(
                f"engine.kind 'exact' does not hold for this model: later tokens change a token's log-probability by "
                f"up to {worst:.2g} nats"
            )
        responses.append(old + ids[b, len(prompt) + len(old) : last].tolist())
        logp.append(np.concatenate([rollout.logp[b], values.cpu().numpy()]))
        versions.append(np.concatenate([drew[b], np.full(last - first, version)]))
        if rollout.top_ids is not None:
            rows, which = rows.topk(rollout.top)
            likeliest.append(np.concatenate([rollout.top_ids[b], which.cpu().numpy()]))
        if rollout.logp_all is not None:
            everything.append(np.concatenate([rollout.logp_all[b], rows.cpu().numpy()]))
    return replace(
        rollout,
        response_ids=responses,
        logp=logp,
        logp_all=everything or None,
        top_ids=likeliest or None,
        version=version,
        finished=~alive.cpu().numpy(),
        token_versions=versions,
    )
