"""The sampler: vLLM in this process, or the exact engine (exact.py); `generate` and `extend` return a Rollout.

The temperature is 1 and nothing is truncated. The engine reports processed log-probabilities: those that the tokens
were drawn from, with the injected offset in them. In this process the engine shares torch's random state, so each
`generate` seeds it and puts the trainer's state back. The first `start` imports vLLM, which takes ten seconds and reads
the environment that is set here.
"""

import contextlib
import os
import random
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch

from realmodel.engine import exact
from realmodel.engine.exact import ExactEngine
from realmodel.policy import answers
from realmodel.policy.align import WHOLE, Rollout
from realmodel.policy.model import check_folder, one_line
from sandbox.errors import BadInput
from sandbox.tabular.policy import ConstantOffset

Kind = Literal["vllm", "exact"]
Dtype = Literal["float32", "bfloat16", "float16"]
CPU_HEAD_DIMS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)  # others start, then die on the first token

# Read when vLLM is imported or started; what the user has set stays.
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}


# An engine that is garbage-collected takes vLLM's process groups with it, and every other engine of the process dies
# on its next token: so engines live as long as the process. A second one starts in half a second.
_engines: list[Any] = []


@dataclass(frozen=True)
class EngineConfig:
    """How the engine runs.

    Args:
        kind: "vllm", or "exact": the trainer's own kernels, no discrepancy at all (exact.py).
        dtype: float32, bfloat16 or float16.
        offset_sd: standard deviation, nats, of a constant discrepancy put into the engine: one normal offset a token
            id, drawn from `seed` once, is added to the logits before every draw, so that q = softmax(logits + offset).
        batch_invariant: vLLM's own mode in which a log-probability does not depend on what else is in the batch.
        max_model_len: tokens of prompt and response together.
        max_num_seqs: responses in flight at once.
        kv_cache_mib: memory of the KV cache, MiB; without a figure vLLM takes a share of the machine.
        seed: vLLM's own (every `generate` brings another), and the offset's.
        enforce_eager: False compiles the model, which takes half a minute.
    """

    kind: Kind = "vllm"
    dtype: Dtype = "float32"
    offset_sd: float = 0.0
    batch_invariant: bool = False
    max_model_len: int = 128
    max_num_seqs: int = 256
    kv_cache_mib: int = 128
    seed: int = 0
    enforce_eager: bool = True

    def __post_init__(self) -> None:
        for name, least in (("max_model_len", 2), ("max_num_seqs", 1), ("kv_cache_mib", 1), ("seed", 0)):
            if getattr(self, name) < least:
                raise BadInput(f"engine.{name} is {getattr(self, name)}, expected at least {least}")
        if self.dtype not in get_args(Dtype):
            raise BadInput(f"dtype {self.dtype!r} is unknown, expected one of: {', '.join(get_args(Dtype))}")
        if self.kind not in get_args(Kind):
            raise BadInput(f"engine.kind {self.kind!r} is unknown, expected one of: {', '.join(get_args(Kind))}")
        if not 0 <= self.offset_sd < np.inf:
            raise BadInput(f"engine.offset_sd is {self.offset_sd}, expected a finite number >= 0")
        if self.kind == "exact" and (self.dtype != "float32" or self.batch_invariant):
            raise BadInput("engine.kind 'exact' computes as the trainer does: leave dtype and batch_invariant alone")


def start(path: str | Path, config: EngineConfig) -> Any:
    """An engine in this process, a `vllm.LLM` or an ExactEngine, with the weights in folder `path` (or of that name).

    Raises BadInput: one line, for a missing or incomplete folder, a head_dim that vLLM cannot serve on a CPU, batch
    invariance on a device that has none, or an engine that does not start (with its root cause).
    """
    check_folder(path)
    if config.kind == "exact":
        return exact.start(path, config.max_model_len, lambda size: _offset(config, size))
    _batch_invariance(config.batch_invariant)
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    if Path(path).is_dir():
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from transformers import AutoConfig

    try:
        model = AutoConfig.from_pretrained(path)
        head_dim = getattr(model, "head_dim", None) or model.hidden_size // model.num_attention_heads
    except Exception as error:  # a damaged config fails in as many ways as it has fields
        raise BadInput(f"model {str(path)!r} has no usable config.json: {_root_cause(error)}") from error
    if getattr(model, "eos_token_id", None) is None:
        raise BadInput(f"model {str(path)!r} has no eos_token_id in its config.json: responses could not end")
    if not torch.cuda.is_available() and head_dim not in CPU_HEAD_DIMS:
        raise BadInput(f"head_dim {head_dim} cannot be served on a CPU, expected one of: {CPU_HEAD_DIMS}")
    width = getattr(model, "moe_intermediate_size", None) or 0
    if not torch.cuda.is_available() and width % 32:  # vLLM pads such experts when it loads them, and cannot reload
        raise BadInput(f"moe_intermediate_size {width} cannot be synced on a CPU, expected a multiple of 32")
    offset = _offset(config, model.vocab_size).tolist()
    set_threads = torch.set_num_threads
    try:
        with _random_state(), _llvmlite_hidden(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # deprecations inside vLLM, which its user can do nothing about
            from vllm import LLM

            if getattr(model, "num_experts", 0):
                _expert_group()
            llm = LLM(**arguments(path, config, offset))
    except Exception as error:  # vLLM raises whatever its parts raise
        raise BadInput(f"engine did not start from {str(path)!r}: {_root_cause(error)}") from error
    finally:
        torch.set_num_threads = set_threads  # vLLM on a CPU replaces it by a function that does nothing
    _engines.append(llm)
    return llm


def _expert_group() -> None:
    """vLLM makes its process groups with a process's first engine, that of experts only if that one is a mixture."""
    from vllm.distributed import parallel_state as groups

    if groups.model_parallel_is_initialized() and groups._EP is None:
        world = groups.get_world_group()
        backend = torch.distributed.get_backend(world.device_group)
        groups._EP = groups.init_model_parallel_group([world.ranks], world.local_rank, backend, group_name="ep")


def arguments(path: str | Path, config: EngineConfig, offset: list[float] | None) -> dict[str, Any]:
    """What vLLM is started with; `offset` as `additional_config` takes it, (V,), where there is one."""
    return {
        "model": str(path),
        "dtype": config.dtype,
        "seed": config.seed,
        "enforce_eager": config.enforce_eager,
        "max_model_len": config.max_model_len,
        "max_num_seqs": config.max_num_seqs,
        "kv_cache_memory_bytes": config.kv_cache_mib << 20,
        "max_logprobs": -1,
        "logprobs_mode": "processed_logprobs",
        "logits_processors": ["realmodel.engine.offset:TokenOffset"] if config.offset_sd else None,
        "additional_config": {"token_offset": offset} if config.offset_sd else {},
        "skip_tokenizer_init": True,  # ids in, ids out: no text is made that nobody reads
        "generation_config": "vllm",  # the folder's own may set another temperature or truncate
        "use_tqdm_on_load": False,
    }


def _batch_invariance(wanted: bool) -> None:
    """Sets vLLM's switch, which holds for the whole process. BadInput where the device has no such kernels."""
    if wanted and not torch.cuda.is_available():
        raise BadInput("engine.batch_invariant needs vLLM's Triton kernels, which no CPU runs: leave it false here")
    if wanted and torch.cuda.get_device_capability() < (8, 0):
        raise BadInput("engine.batch_invariant needs a GPU of compute capability 8.0 or newer")
    if _engines and wanted != (os.environ.get("VLLM_BATCH_INVARIANT") == "1"):
        raise BadInput("engine.batch_invariant differs from that of an engine of this process: start another process")
    if wanted:
        os.environ["VLLM_BATCH_INVARIANT"] = "1"


def _offset(config: EngineConfig, vocabulary: int) -> np.ndarray:
    return ConstantOffset(config.offset_sd)(np.random.default_rng(config.seed), (1, vocabulary))[0].astype(np.float32)


def offset(llm: Any) -> torch.Tensor | None:
    """What the engine adds to its logits, one number a token id, nats; None where nothing. (V,)"""
    if isinstance(llm, ExactEngine):
        return llm.offset
    values = llm.llm_engine.vllm_config.additional_config.get("token_offset")
    return None if values is None else torch.tensor(values)


def vocabulary(llm: Any) -> int:
    """Token ids the engine can draw."""
    return llm.vocabulary if isinstance(llm, ExactEngine) else llm.model_config.get_vocab_size()


def can_report(llm: Any, top: int) -> None:
    """Raises BadInput where the engine cannot return the `top` log-probabilities (see `generate`) that a run needs."""
    if isinstance(llm, ExactEngine):
        return
    mode, most = llm.model_config.logprobs_mode, llm.model_config.max_logprobs
    if not str(mode).endswith("processed_logprobs"):
        raise BadInput(f"engine reports {mode}, and a correction needs processed_logprobs: those it drew from")
    size = vocabulary(llm) if top == WHOLE else top
    if 0 <= most < size:
        raise BadInput(f"the correction centres the score over {size} tokens, but the engine reports at most {most}")


def generate(
    llm: Any,
    prompt_ids: list[list[int]],
    n: int,
    max_new_tokens: int,
    seed: int,
    top: int = 0,
    version: int = 0,
    room: int = 0,
) -> Rollout:
    """`n` responses a prompt at temperature 1, prompt by prompt; the same seed gives the same tokens.

    Args:
        llm: from `start`.
        prompt_ids: token ids of each prompt.
        n: responses a prompt.
        max_new_tokens: length at which a response without eos is cut.
        seed: of the engine's random state; the caller's own is left as it was.
        top: also return the log-probabilities of the likeliest `top` tokens at every step; WHOLE: of all.
        version: of the weights that the engine holds.
        room: tokens a response may still get from `extend`.

    Raises BadInput: for no prompt, an empty one or one too long, and where the engine returns another number of
    responses, an empty response, or a log-probability that is missing.
    """
    if not prompt_ids:
        raise BadInput("prompt_ids: no prompt")
    new = max_new_tokens + room
    limit = llm.max_model_len if isinstance(llm, ExactEngine) else llm.model_config.max_model_len
    for i, prompt in enumerate(prompt_ids):
        if not prompt or len(prompt) + new > limit:
            fits = f"expected 1 to {limit - new}: engine.max_model_len {limit} less {new} new ones"
            raise BadInput(f"prompt_ids[{i}] has {len(prompt)} tokens, {fits}")
    if isinstance(llm, ExactEngine):
        return exact.generate(llm, prompt_ids, n, max_new_tokens, seed, top, version, room)
    requests = ask(llm, prompt_ids, n, max_new_tokens, seed, top)
    return answers.rollout(requests, prompt_ids, n, vocabulary(llm), eos_ids(llm), top, version)


def fresh(llm: Any, prompt_ids: list[list[int]], max_new_tokens: int, seed: int) -> tuple[Rollout, int]:
    """One vLLM response a prompt, and how many tokens of the first prompt were answered from the prefix cache."""
    requests = ask(llm, prompt_ids, 1, max_new_tokens, seed)
    # of the first: the others may share its prefix, which is no sign of an old cache
    return answers.rollout(requests, prompt_ids, 1, vocabulary(llm), eos_ids(llm)), requests[0].num_cached_tokens or 0


def extend(llm: Any, rollout: Rollout, max_new_tokens: int, seed: int, version: int) -> Rollout:
    """The rollout with up to `max_new_tokens` more tokens of every unfinished response, from the weights of `version`.

    What was drawn keeps its log-probability and its version; the new tokens are conditioned on it, and the engine
    computes its keys and values anew, as asynchronous trainers do that interrupt a generation for a sync.
    """
    if isinstance(llm, ExactEngine):
        return exact.extend(llm, rollout, max_new_tokens, seed, version)
    unfinished = np.flatnonzero(~rollout.finished)
    if not len(unfinished):
        return rollout
    prompts = [rollout.prompt_ids[b] + rollout.response_ids[b] for b in unfinished]
    more = generate(llm, prompts, 1, max_new_tokens, seed, rollout.top, version)
    responses, logp, versions = list(rollout.response_ids), list(rollout.logp), list(rollout.versions())
    tables = {name: list(getattr(rollout, name) or ()) for name in ("logp_all", "top_ids")}
    finished = rollout.finished.copy()
    for i, b in enumerate(unfinished):
        responses[b] = responses[b] + more.response_ids[i]
        logp[b] = np.concatenate([logp[b], more.logp[i]])
        versions[b] = np.concatenate([versions[b], more.versions()[i]])
        finished[b] = more.finished[i]
        for name, rows in tables.items():
            if rows:
                rows[b] = np.concatenate([rows[b], getattr(more, name)[i]])
    return replace(
        rollout, response_ids=responses, logp=logp, version=version, finished=finished, token_versions=versions,
        **{name: rows or None for name, rows in tables.items()},
    )  # fmt: skip


def ask(llm: Any, prompt_ids: list[list[int]], n: int, max_new_tokens: int, seed: int, top: int = 0) -> list:
    """vLLM's own answer, one request a prompt; BadInput where it dies."""
    from vllm import SamplingParams
    from vllm.inputs import TokensPrompt

    # A seed in SamplingParams gives each request a generator of its own: equal prompts then get equal responses.
    params = SamplingParams(
        n=n,
        temperature=1.0,
        max_tokens=max_new_tokens,
        logprobs=top,
        flat_logprobs=True,  # lists, not a dictionary a token: the whole vocabulary costs a quarter as much
        detokenize=False,
        stop_token_ids=sorted(eos_ids(llm)),
    )
    with _random_state():
        torch.manual_seed(seed)
        try:
            return llm.generate([TokensPrompt(prompt_token_ids=p) for p in prompt_ids], params, use_tqdm=False)
        except Exception as error:  # vLLM raises whatever its parts raise
            raise BadInput(f"engine failed while sampling: {_root_cause(error)}") from error


def eos_ids(llm: Any) -> set[int]:
    """The token ids that end a response, from the model's config."""
    if isinstance(llm, ExactEngine):
        return exact.eos_ids(llm.model.config)
    return exact.eos_ids(llm.model_config.hf_config)


@contextlib.contextmanager
def _random_state() -> Iterator[None]:
    """Puts the random states that vLLM seeds (torch, numpy, random) back as they were."""
    python, legacy = random.getstate(), np.random.get_state()  # noqa: NPY002, vLLM seeds it
    with torch.random.fork_rng():
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(legacy)  # noqa: NPY002


@contextlib.contextmanager
def _llvmlite_hidden() -> Iterator[None]:
    """vLLM scans every attribute of every module as it starts, and dies on one of llvmlite's, which numba imports."""
    hidden = {name: module for name, module in sys.modules.items() if name.partition(".")[0] == "llvmlite"}
    for name in hidden:
        del sys.modules[name]
    try:
        yield
    finally:
        sys.modules.update(hidden)


def _root_cause(error: BaseException) -> str:
    from pydantic import ValidationError

    while cause := error.__cause__ or error.__context__:
        error = cause
    # pydantic's own first line says only how many errors there are
    return one_line(error, error.errors()[0]["msg"] if isinstance(error, ValidationError) else None)
