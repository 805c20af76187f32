"""`mismatch train CONFIG --dry-run`: what a run would ask of the machine, without an engine, a GPU or a download.

Memory is added up from the architecture, counted on torch's meta device: exact for weights, gradients, moments and
snapshots, an estimate for activations (real runs of the small model stay within a factor of two of the sum).
"""

import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from realmodel.engine import sampler
from realmodel.policy import logprobs, tasks
from realmodel.policy import model as policy
from realmodel.policy.recipes import NAMED, Recipe, char_tokenizer, initialise
from realmodel.training import underway
from realmodel.training.settings import RunConfig
from sandbox.errors import BadInput

DENSE: dict[str, Any] = {"vocab_size": 151_936, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128}
# Of models that can only be had from the hub; their config.json, as far as memory depends on it
KNOWN: dict[str, dict[str, Any]] = {
    "Qwen/Qwen3-0.6B": DENSE | {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28},
    "Qwen/Qwen3-1.7B": DENSE | {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28},
}
BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


def plan(config: RunConfig) -> dict[str, Any]:
    """What `--dry-run --json` prints: model, memory by item in MiB and its sum, what the device has, engine arguments.

    Raises BadInput: a model of which neither a config.json nor the sizes are at hand, a config that `sampler.start` or
    the task would refuse.
    """
    task, made = tasks.get(config.task), architecture(config)
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        parameters = sum({id(p): p.numel() for p in AutoModelForCausalLM.from_config(made).parameters()}.values())
    length = config.engine.max_model_len
    if 0 < length <= task.max_new_tokens:
        raise BadInput(
            f"engine.max_model_len is {length}, but responses to task {task.name} may have {task.max_new_tokens} tokens"
        )
    responses = config.prompts * config.group
    at_once = min(config.micro_batch or responses, responses)
    items = trainer_memory(config, made, parameters, at_once * length) | engine_memory(config, parameters)
    used, has = sum(items.values()), device_memory()
    return {
        "model": config.model,
        "parameters": parameters,
        "vocabulary": made.vocab_size,
        "tokens_a_backward_pass": at_once * length,
        "memory_mib": {name: round(size / 2**20) for name, size in items.items()},
        "memory_mib_sum": round(used / 2**20),
        "device": "cuda" if torch.cuda.is_available() else "cpu",
        "device_memory_mib": round(has / 2**20),
        "fits": used <= has,
        "checkpoint_mib": round((12 + 4 * (2 if config.probe_kept else 1)) * parameters / 2**20),
        "centring_tokens": underway.top(config),
        "engine": asdict(config.engine) | {"arguments": sampler.arguments(config.model, config.engine, None)},
    }


def tables(outcome: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """The plan for people."""
    memory = outcome["memory_mib"] | {"sum": outcome["memory_mib_sum"], "device": outcome["device_memory_mib"]}
    title = f"{outcome['model']}, {outcome['parameters']:,} parameters, on {outcome['device']}"
    verdict = "fits" if outcome["fits"] else "does not fit"
    engine = outcome["engine"]["arguments"]
    return {
        f"{title}: memory, {verdict}": [{"item": name, "MiB": size} for name, size in memory.items()],
        "the engine would be started with": [{"argument": name, "value": str(value)} for name, value in engine.items()],
    }


def architecture(config: RunConfig) -> Any:
    """transformers' config of the run's model. Raises BadInput where there is neither a folder nor a known name."""
    from transformers import AutoConfig, Qwen3Config

    if config.model in NAMED:
        return initialise(Recipe(**NAMED[config.model]), char_tokenizer()).config
    if config.model in KNOWN:
        return Qwen3Config(**KNOWN[config.model], tie_word_embeddings=True)
    policy.check_folder(config.model)
    if not Path(config.model).is_dir():
        raise BadInput(f"model {config.model!r} would be downloaded; sizes are known of {', '.join(KNOWN)} or a folder")
    return AutoConfig.from_pretrained(config.model)


def trainer_memory(config: RunConfig, made: Any, parameters: int, tokens: int) -> dict[str, float]:
    """Bytes by item. Weights, gradients and AdamW's two moments are float32; every version in flight is a snapshot.

    Activations a token and layer: inputs of norms, projections, attention and the MLP's three products,
    8 hidden + 2 (q + k + v) + 3 intermediate numbers, times 1.5 for what lives beside them (four small models took 1.3
    to 1.7 times); with checkpointing one layer's, and every layer's input.
    """
    products = BYTES[config.trainer_dtype]
    heads = made.num_attention_heads + 2 * made.num_key_value_heads
    inner = getattr(made, "moe_intermediate_size", 0) * getattr(made, "num_experts_per_tok", 0)
    layer = 8 * made.hidden_size + 2 * heads * made.head_dim + 3 * (inner or made.intermediate_size)
    kept = layer * (1 if config.checkpointing else made.num_hidden_layers)
    inputs = made.hidden_size * made.num_hidden_layers if config.checkpointing else 0
    table = min(4 * tokens * made.vocab_size, logprobs.CHUNK_MIB * 2**20)
    top = underway.top(config)
    columns = 0 if not top else (made.vocab_size if top < 0 else top)
    return {
        "weights": 4 * parameters,
        "gradients": 4 * parameters,
        "adamw": 8 * parameters,
        "snapshots": 4 * parameters * (1 + config.delay + config.probe_kept),
        "activations": 1.5 * tokens * (kept * products + 4 * inputs),
        "logits": 4 * table,
        "centring": 4 * 6 * config.prompts * config.group * config.engine.max_model_len * columns,
    }


def engine_memory(config: RunConfig, parameters: int) -> dict[str, float]:
    """Bytes of the engine's weights, in its dtype, and of its KV cache; the exact engine has no cache."""
    cache = 0 if config.engine.kind == "exact" else config.engine.kv_cache_mib * 2**20
    return {"engine_weights": BYTES[config.engine.dtype] * parameters, "engine_kv_cache": cache}


def device_memory() -> int:
    """Bytes of the device the trainer would use: of the GPU, or of the machine."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_properties(0).total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
