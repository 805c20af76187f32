"""The policy: load a Qwen3, keep snapshots of its weights, score its answers, sample from it.

`log_probs(..., weights=snapshot)` (logprobs.py) is the trainer's engine at another version of its weights, without a
second model. small.py has the small policies of our own.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from realmodel.policy.align import Rollout, pad_ids
from realmodel.policy.logprobs import log_probs, log_probs_of_many
from realmodel.policy.tasks import Problem
from sandbox.errors import BadInput


def load(path: str | Path, dtype: torch.dtype = torch.float32) -> tuple[Any, Any]:
    """(model, tokenizer) from a folder, or by name from the hub.

    Raises BadInput: one line, where the folder does not exist or has no config, weights or tokenizer.
    """
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM, AutoTokenizer

    check_folder(path)
    no_progress_bars()
    try:
        model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
        tokenizer: Any = AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError, RuntimeError, KeyError, AttributeError, SafetensorError) as error:
        raise BadInput(f"model {str(path)!r} cannot be loaded: {one_line(error)}") from error
    rows = model.get_input_embeddings().num_embeddings
    if tokenizer.eos_token_id is None or not 0 < len(tokenizer) <= rows:
        raise BadInput(
            f"model {str(path)!r} has a tokenizer of {len(tokenizer)} tokens that does not fit its {rows} rows"
        )
    return model.to("cuda" if torch.cuda.is_available() else "cpu"), tokenizer


def check_folder(path: str | Path) -> None:
    """Raises BadInput where `path` is not a folder with config and weights; a hub name (owner/name) passes."""
    folder = Path(path)
    if not folder.is_dir():
        if isinstance(path, str) and path.count("/") == 1 and path[0] not in "./~":
            return
        raise BadInput(f"model {str(path)!r} is no folder")
    if not (folder / "config.json").is_file():
        raise BadInput(f"model {str(path)!r} has no config.json")
    if not any(folder.glob("*.safetensors")) and not any(folder.glob("*.bin")):
        raise BadInput(f"model {str(path)!r} has no weights (*.safetensors)")


def snapshot(model: nn.Module) -> dict[str, Tensor]:
    """Clones of the full state, tied `lm_head.weight` included, detached: a state dict.

    Tied names share one clone: functional_call refuses two tensors for one tied weight.
    """
    clones: dict[int, Tensor] = {}
    state = model.state_dict()
    for value in state.values():
        clones.setdefault(value.data_ptr(), value.detach().clone())
    return {name: clones[value.data_ptr()] for name, value in state.items()}


def pass_probability(model: nn.Module, problems: Sequence[Problem], tokenizer) -> Tensor:
    """Probability that the policy at temperature 1 gives each problem's answer and then eos: no sampling noise. (n,)"""
    ids, rows, wanted, mask = _answers(problems, tokenizer)
    logp = log_probs_of_many(model, ids, rows, wanted[:, None]).cpu()
    return torch.zeros(mask.shape).masked_scatter(mask, logp).sum(-1).exp()


@torch.no_grad()
def greedy_right(model: nn.Module, problems: Sequence[Problem], tokenizer) -> Tensor:
    """Whether the most likely token is right at every place of the answer and at eos. bool (n,)"""
    ids, rows, wanted, mask = _answers(problems, tokenizer)
    best = log_probs(model, ids, None).flatten(0, 1)[rows].argmax(-1).cpu()
    return torch.ones(mask.shape, dtype=torch.bool).masked_scatter(mask, best == wanted).all(-1)


@torch.no_grad()
def sample(
    model: nn.Module,
    prompt_ids: list[list[int]],
    n: int,
    max_new_tokens: int,
    generator: torch.Generator,
    eos: int,
    version: int = 0,
) -> Rollout:
    """`n` responses a prompt at temperature 1 from the trainer's own engine and weights: no mismatch at all.

    Every token costs a pass over the whole sequence; there is no cache, which a small model does not need. Prompts of
    one length are drawn together.

    Raises BadInput: for no prompt, or one without a token.
    """
    if not prompt_ids or not all(prompt_ids):
        raise BadInput("prompt_ids: no prompt, or one without a token")
    prompts = [p for p in prompt_ids for _ in range(n)]
    responses: list[list[int]] = [[] for _ in prompts]
    logp: list[np.ndarray] = [np.zeros(0) for _ in prompts]
    for length in sorted({len(p) for p in prompts}):
        mine = [b for b, p in enumerate(prompts) if len(p) == length]
        ids, rows = _drawn(model, [prompts[b] for b in mine], max_new_tokens, generator, eos)
        for b, drawn, values in zip(mine, ids, rows, strict=True):
            responses[b] = drawn[: drawn.index(eos) + 1] if eos in drawn else drawn
            logp[b] = values[: len(responses[b])]
    return Rollout(
        prompt_ids=prompts,
        response_ids=responses,
        logp=logp,
        logp_all=None,
        version=version,
        prompt_index=np.repeat(np.arange(len(prompt_ids)), n),
        finished=np.array([r[-1] == eos for r in responses]),
    )


def _drawn(
    model: nn.Module, prompts: list[list[int]], max_new_tokens: int, generator: torch.Generator, eos: int
) -> tuple[list[list[int]], np.ndarray]:
    """Tokens drawn after prompts of one length, and their log-probabilities, until all have met eos. (B, T)"""
    device = next(model.parameters()).device
    ids, drawn_logp = torch.tensor(prompts, device=device), []
    alive = torch.ones(len(prompts), dtype=torch.bool, device=device)
    for _ in range(max_new_tokens):
        logp = model(input_ids=ids, use_cache=False).logits[:, -1].float().log_softmax(-1)
        token = torch.multinomial(logp.exp(), 1, generator=generator)
        drawn_logp.append(logp.gather(-1, token))
        ids = torch.cat([ids, token], dim=1)
        alive &= token[:, 0] != eos
        if not alive.any():
            break
    return ids[:, len(prompts[0]) :].tolist(), torch.cat(drawn_logp, dim=1).cpu().numpy()


def _answers(problems: Sequence[Problem], tokenizer) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Padded prompts with answers and eos (n, L), flat rows that predict those answers and their ids (N,), and where
    they stand, bool (n, A)."""
    prompts = [tokenizer.encode(p.prompt) for p in problems]
    answers = [[*tokenizer.encode(p.answer), tokenizer.eos_token_id] for p in problems]
    ids, _ = pad_ids([p + a for p, a in zip(prompts, answers, strict=True)], tokenizer.pad_token_id)
    wanted, mask = pad_ids(answers, tokenizer.pad_token_id)
    first = torch.tensor([[b * ids.shape[1] + len(p) - 1] for b, p in enumerate(prompts)])
    mask = mask.bool()
    return ids, (first + torch.arange(wanted.shape[1]))[mask], wanted[mask], mask


def no_progress_bars() -> None:
    """transformers draws a bar for every file it reads or writes, over whatever the caller draws."""
    from transformers.utils import logging

    logging.disable_progress_bar()


def one_line(error: BaseException, message: str | None = None) -> str:
    """What an error says (or `message`, where that says it better) on one line; its type where it says nothing."""
    return " ".join((str(error) if message is None else message).split())[:300] or type(error).__name__
