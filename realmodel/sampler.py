"""The sampler: vLLM in this process, started from a folder of weights; `generate` returns a Rollout.

Temperature is 1 and nothing is truncated, so the reported log-probabilities are those the tokens were drawn from.
In process the engine shares torch's random state, so each `generate` seeds it and puts the trainer's state back;
vLLM is imported on the first `start`, which costs ten seconds and reads the environment set here.
"""

import contextlib
import os
import random
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch

from realmodel.align import Rollout
from realmodel.model import check_folder, one_line
from sandbox.errors import BadInput

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
        dtype: float32, bfloat16 or float16.
        max_model_len: tokens of prompt and response together.
        max_num_seqs: responses in flight at once.
        kv_cache_mib: memory of the KV cache, MiB; without a figure vLLM takes a share of the machine.
        seed: vLLM's own; every `generate` brings another.
        enforce_eager: False compiles the model, which takes half a minute.
    """

    dtype: Dtype = "float32"
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


def start(path: str | Path, config: EngineConfig) -> Any:
    """A vLLM engine (`vllm.LLM`) in this process, holding the weights in folder `path` (or of that hub name).

    Raises:
        BadInput: one line, for a missing or incomplete folder, a head_dim that vLLM cannot serve on a CPU, or an
            engine that does not start (with its root cause).
    """
    check_folder(path)
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
    set_threads = torch.set_num_threads
    try:
        with _random_state(), _llvmlite_hidden(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # deprecations inside vLLM, which its user can do nothing about
            from vllm import LLM

            llm = LLM(
                model=str(path),
                dtype=config.dtype,
                seed=config.seed,
                enforce_eager=config.enforce_eager,
                max_model_len=config.max_model_len,
                max_num_seqs=config.max_num_seqs,
                kv_cache_memory_bytes=config.kv_cache_mib << 20,
                max_logprobs=-1,
                skip_tokenizer_init=True,  # ids in, ids out: no text is made that nobody reads
                generation_config="vllm",  # the folder's own may set another temperature or truncate
                use_tqdm_on_load=False,
            )
    except Exception as error:  # vLLM raises whatever its parts raise
        raise BadInput(f"engine did not start from {str(path)!r}: {_root_cause(error)}") from error
    finally:
        torch.set_num_threads = set_threads  # vLLM on a CPU replaces it by a function that does nothing
    _engines.append(llm)
    return llm


def generate(
    llm: Any,
    prompt_ids: list[list[int]],
    n: int,
    max_new_tokens: int,
    seed: int,
    whole_vocabulary: bool = False,
    version: int = 0,
) -> Rollout:
    """`n` responses a prompt at temperature 1, prompt by prompt; the same seed gives the same tokens.

    Args:
        llm: from `start`.
        prompt_ids: token ids of each prompt.
        n: responses a prompt.
        max_new_tokens: length at which a response without eos is cut.
        seed: of the engine's random state; the caller's own is left as it was.
        whole_vocabulary: also return the log-probability of every token at every step.
        version: of the weights that the engine holds.

    Raises:
        BadInput: for no prompt, an empty one or one too long, and where the engine returns another number of
            responses, an empty response, or a log-probability that is missing.
    """
    from vllm import SamplingParams
    from vllm.inputs import TokensPrompt

    limit = llm.model_config.max_model_len
    if not prompt_ids:
        raise BadInput("prompt_ids: no prompt")
    for i, prompt in enumerate(prompt_ids):
        if not prompt or len(prompt) + max_new_tokens > limit:
            room = (
                f"expected 1 to {limit - max_new_tokens}: engine.max_model_len {limit} less {max_new_tokens} new ones"
            )
            raise BadInput(f"prompt_ids[{i}] has {len(prompt)} tokens, {room}")
    # A seed in SamplingParams gives each request a generator of its own: equal prompts then get equal responses.
    params = SamplingParams(
        n=n,
        temperature=1.0,
        max_tokens=max_new_tokens,
        logprobs=-1 if whole_vocabulary else 0,
        flat_logprobs=True,  # lists, not a dictionary a token: the whole vocabulary costs a quarter as much
        detokenize=False,
        stop_token_ids=sorted(eos_ids(llm)),
    )
    with _random_state():
        torch.manual_seed(seed)
        try:
            requests = llm.generate([TokensPrompt(prompt_token_ids=p) for p in prompt_ids], params, use_tqdm=False)
        except Exception as error:  # vLLM raises whatever its parts raise
            raise BadInput(f"engine failed while sampling: {_root_cause(error)}") from error
    return _rollout(llm, requests, prompt_ids, n, whole_vocabulary, version)


def eos_ids(llm: Any) -> set[int]:
    """The token ids that end a response, from the model's config."""
    eos = llm.model_config.hf_config.eos_token_id
    return set(eos) if isinstance(eos, list) else {eos}


def _rollout(llm: Any, requests: list, prompt_ids: list[list[int]], n: int, whole: bool, version: int) -> Rollout:
    """The engine's answer as a Rollout, once it is as many responses as asked for, each with its log-probabilities."""
    if len(requests) != len(prompt_ids):
        raise BadInput(f"engine returned {len(requests)} requests, expected {len(prompt_ids)}")
    vocabulary = llm.model_config.get_vocab_size()
    responses, logp, logp_all = [], [], []
    for i, request in enumerate(requests):
        if len(request.outputs) != n:
            raise BadInput(f"engine returned {len(request.outputs)} responses to prompt {i}, expected {n}")
        for output in request.outputs:
            ids = list(output.token_ids)
            drawn, everything = _logp(ids, output.logprobs, vocabulary, whole, f"response {len(responses)}")
            responses.append(ids)
            logp.append(drawn)
            logp_all.append(everything)
    eos = eos_ids(llm)
    return Rollout(
        prompt_ids=[list(p) for p in prompt_ids for _ in range(n)],
        response_ids=responses,
        logp=logp,
        logp_all=logp_all if whole else None,
        version=version,
        prompt_index=np.repeat(np.arange(len(prompt_ids)), n),
        finished=np.array([ids[-1] in eos for ids in responses]),
    )


def _logp(ids: list[int], flat: Any, vocabulary: int, whole: bool, name: str) -> tuple[np.ndarray, np.ndarray | None]:
    """Log-probabilities of the drawn tokens (T,), and of all tokens (T, V) where asked for.

    The engine lists, for each step, the drawn token first and then the others by rank.
    """
    if not ids:
        raise BadInput(f"engine returned an empty {name}")
    if flat is None or len(flat) != len(ids) or any(value is None for value in flat.logprobs):
        raise BadInput(f"engine reported no log-probability for a token of {name}")
    values = np.array(flat.logprobs, dtype=np.float32)
    tokens = np.array(flat.token_ids)
    drawn = np.array(flat.start_indices)
    if tokens[drawn].tolist() != ids:
        raise BadInput(f"engine reported log-probabilities of other tokens than it drew in {name}")
    if not whole:
        return values[drawn], None
    if len(values) != len(ids) * (vocabulary + 1):
        raise BadInput(f"engine reported {len(values)} log-probabilities in {name}, not the whole vocabulary")
    everything = np.full((len(ids), vocabulary), np.nan, dtype=np.float32)
    ranked = tokens.reshape(len(ids), -1)
    np.put_along_axis(everything, ranked, values.reshape(ranked.shape), axis=1)
    if np.isnan(everything).any():
        raise BadInput(f"engine reported no log-probability for part of the vocabulary in {name}")
    return values[drawn], everything


@contextlib.contextmanager
def _random_state() -> Iterator[None]:
    """Puts the random states that vLLM seeds (torch, numpy, random) back as they were."""
    python, legacy = random.getstate(), np.random.get_state()  # noqa: NPY002
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
