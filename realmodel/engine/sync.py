"""Weight transfer from trainer to sampler, and the proof that it arrived; the only file that knows how vLLM does it.

vLLM packs weights for its kernels, so a parameter can be new while the kernel still multiplies by the old one, in
silence: pushed without `lm_head.weight`, a tied model keeps its old output layer; on a CPU, reloaded experts are not
packed again, and their kernel reads plain weights as packed ones. `verify` therefore reads the weights back through the
kernels: a one-hot input returns one column of the matrix that is really in use, exactly in any dtype, since everything
else it adds is zero. Experts multiply by the very tensors that they hold, which are compared with the trainer's weights
packed the same way. It then compares a short generation with the trainer, which also shows whether the engine still
answers from a cache of older weights. The exact engine must agree bitwise.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from realmodel.engine import sampler
from realmodel.engine.exact import ExactEngine
from realmodel.policy.align import pad, predicted_by, wanted
from realmodel.policy.logprobs import log_probs, log_probs_at
from sandbox.errors import BadInput

# Largest RMS of log mu - log q over the probe, nats, by the coarser dtype of the two engines. For float32 the largest
# single difference is bound too. The others only catch gross faults: the read-back is the exact check.
PROBE_RMS = {"float32": 1e-5, "float16": 0.02, "bfloat16": 0.15}
PROBE_MAX_FLOAT32 = 5e-5
FLIPPED = 0.1  # share of the probe's tokens that another choice of experts may move by any amount: not compared


class SyncError(BadInput):
    """The sampler does not hold the trainer's weights, or still answers from a cache of older ones."""


@dataclass(frozen=True)
class Verification:
    """What was compared after a sync that holds.

    Args:
        weights: weight values read back from the engine, all equal to the trainer's rounded to the engine's dtype.
        tokens: tokens of the probe.
        max_difference, rms: of log mu - log q over the probe, nats.
    """

    weights: int
    tokens: int
    max_difference: float
    rms: float


def push(llm: Any, model: nn.Module, weights: dict[str, Tensor] | None = None) -> None:
    """Puts the trainer's weights into the running engine and empties its prefix cache.

    Args:
        llm, model: the engine and the trainer.
        weights: a snapshot (state dict) to push instead of the model's own.

    Raises SyncError: where the prefix cache could not be emptied (a request is still running).
    """
    # state_dict, not named_parameters: only the former has a tied lm_head.weight.
    state = model.state_dict() if weights is None else weights
    if isinstance(llm, ExactEngine):
        llm.model.load_state_dict(state)
        return
    given = [(name, value.detach()) for name, value in state.items()]
    llm.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(given)})
    if not torch.cuda.is_available():
        llm.apply_model(_pack_experts)
    if not llm.reset_prefix_cache():
        raise SyncError("prefix cache of the engine was not emptied after the weights changed")


def verify(
    llm: Any, model: nn.Module, probe: list[list[int]], max_new_tokens: int = 2, seed: int = 0, columns: int = 64
) -> Verification:
    """Proof that the engine holds the trainer's weights; call it after each `push`.

    Args:
        llm: the engine.
        model: the trainer.
        probe: prompts, of which the first is also used to look for a stale prefix cache: an engine whose cache was
            emptied has none of its tokens. So use prompts that the run samples, eight or so.
        max_new_tokens: length of the probe's responses: their first token comes from the pass over the prompt, the
            next from decoding.
        seed: of the probe and of the columns.
        columns: columns of each weight matrix to read back; all where there are no more than that.

    Raises SyncError: naming the layer that is stale, the cached tokens, or the size of the disagreement.
    """
    if isinstance(llm, ExactEngine):
        weights = _same_weights(llm, model)
        rollout = sampler.generate(llm, probe, 1, max_new_tokens, seed)
    else:
        weights = read_back(llm, model, columns, seed)
        rollout, cached = sampler.fresh(llm, probe, max_new_tokens, seed)
        if cached:
            raise SyncError(f"prefix cache is stale: {cached} tokens of the first probe prompt are answered from it")
    ids, _ = pad(rollout, pad_id=0)
    rows, tokens, mask = predicted_by(rollout)
    with torch.no_grad():
        offset = sampler.offset(llm)
        if offset is None:
            logp = log_probs_at(model, ids, *wanted(rollout, ids.shape[1], 0, centre=False))[:, 0].cpu().numpy()
        else:
            whole = log_probs(model, ids, None)
            whole = (whole + offset.to(whole.device)).log_softmax(-1).cpu()
            logp = whole[torch.arange(len(ids))[:, None], rows, tokens][mask].numpy()
    difference = logp - np.concatenate(rollout.logp)
    rms, worst = float(np.sqrt(np.mean(difference**2))), float(np.abs(difference).max())
    if isinstance(llm, ExactEngine):
        if worst != 0:
            raise SyncError(f"exact engine and trainer disagree after a sync, by up to {worst:.2g} nats")
        return Verification(weights, int(mask.sum()), worst, rms)
    products = getattr(model, "autocast_dtype", None) or next(model.parameters()).dtype
    names = {str(dtype).removeprefix("torch.") for dtype in (llm.model_config.dtype, products)}
    limit = max(PROBE_RMS[name] for name in names)
    compared = np.sort(np.abs(difference))
    if llm.apply_model(_has_experts)[0]:
        compared = compared[: math.ceil((1 - FLIPPED) * len(compared))]
    size = float(np.sqrt(np.mean(compared**2)))
    if not size <= limit or (names == {"float32"} and not compared[-1] <= PROBE_MAX_FLOAT32):
        told = f"RMS {size:.2g} nats a token (limit {limit:g}), max {compared[-1]:.2g}"
        raise SyncError(f"sampler and trainer disagree after a sync: {told}")
    return Verification(weights=weights, tokens=int(mask.sum()), max_difference=worst, rms=rms)


def _same_weights(engine: ExactEngine, model: nn.Module) -> int:
    count, state = 0, model.state_dict()
    for name, have in engine.model.state_dict().items():
        if not torch.equal(have, state[name]):
            raise SyncError(f"{name} is stale in the engine")
        count += have.numel()
    return count


def read_back(llm: Any, model: nn.Module, columns: int = 64, seed: int = 0) -> int:
    """How many weight values the engine's own kernels gave back, all equal to the trainer's in the engine's dtype.

    Raises SyncError: naming the first layer that differs, with the share of differing values and the largest
    difference.
    """
    state = model.state_dict()

    def compare(engine: Any) -> int:
        count = 0
        for name, have, want in _in_use(engine, state, columns, np.random.default_rng(seed)):
            want = want.to(device=have.device, dtype=have.dtype)
            if have.shape != want.shape:
                raise SyncError(f"{name}: engine has shape {tuple(have.shape)}, trainer {tuple(want.shape)}")
            differs = have != want
            if differs.any():
                share, worst = differs.float().mean().item(), (have.float() - want.float()).abs().max().item()
                raise SyncError(
                    f"{name} is stale in the engine: {share:.0%} of its values differ, by up to {worst:.2g}"
                )
            count += have.numel()
        return count

    return llm.apply_model(compare)[0]


@torch.no_grad()
def _in_use(
    engine: Any, state: dict[str, Tensor], columns: int, rng: np.random.Generator
) -> Iterator[tuple[str, Tensor, Tensor]]:
    """(name, what the engine uses, what the trainer has) for every weight; matrices as the chosen columns (C, N)."""
    from vllm.model_executor.layers.linear import LinearBase

    def chosen(width: int) -> Tensor:
        picked = np.arange(width) if width <= columns else rng.choice(width, columns, replace=False)
        return torch.from_numpy(np.sort(picked)).to(device)

    def one_hot(picked: Tensor, width: int) -> Tensor:
        return nn.functional.one_hot(picked, width).to(dtype)

    embedding = next(iter(engine.parameters()))
    device, dtype = embedding.device, embedding.dtype
    covered = set()
    for name, module in engine.named_modules():
        if not isinstance(module, LinearBase):
            continue
        weight = torch.cat([state[f"{part}.weight"] for part in _parts(engine, name)])
        picked = chosen(weight.shape[1])
        have = module.quant_method.apply(module, one_hot(picked, weight.shape[1]))  # the layer without its bias
        yield name, have, weight[:, picked.to(weight.device)].T
        covered.add(f"{name}.weight")
        if isinstance(module.bias, Tensor):
            yield (
                f"{name}.bias",
                module.bias.to(dtype),
                torch.cat([state[f"{part}.bias"] for part in _parts(engine, name)]),
            )
            covered.add(f"{name}.bias")
    for name, layer in _experts(engine):
        at = name.removesuffix(".routed_experts")
        held = {"w13_weight": state[f"{at}.gate_up_proj"], "w2_weight": state[f"{at}.down_proj"]}
        for weight, want in _packed(layer, held).items():
            yield f"{name}.{weight}", getattr(layer, weight), want
            covered.add(f"{name}.{weight}")
    head = state["lm_head.weight"]
    picked = chosen(head.shape[1])
    logits = engine.compute_logits(one_hot(picked, head.shape[1]))
    yield "lm_head", logits[:, : len(head)].to(dtype), head[:, picked.to(head.device)].T
    for name, parameter in engine.named_parameters():
        if name not in covered and name != "lm_head.weight":
            rows = len(state[name])  # vLLM pads the vocabulary
            yield name, parameter[:rows], state[name]


def _experts(engine: Any) -> list[tuple[str, Any]]:
    """(name, layer) of every mixture of experts."""
    return [(name, layer) for name, layer in engine.named_modules() if hasattr(layer, "w13_weight")]


def _has_experts(engine: Any) -> bool:
    return bool(_experts(engine))


def _pack_experts(engine: Any) -> None:
    """What vLLM 0.32 does when it loads experts for its CPU kernel, and forgets when it reloads them."""
    for _, layer in _experts(engine):
        layer.quant_method.moe_kernel.fused_experts.process_weights_after_loading(layer)


def _packed(layer: Any, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Expert weights in the layer's dtype and its kernel's own format, as vLLM makes it when it loads them."""
    from vllm.model_executor.layers.fused_moe.oracle.unquantized import convert_to_unquantized_kernel_format

    like = layer.w13_weight
    w13, w2 = (weights[name].to(device=like.device, dtype=like.dtype).clone() for name in ("w13_weight", "w2_weight"))
    method, scratch = layer.quant_method, nn.Module()
    made = convert_to_unquantized_kernel_format(method.unquantized_backend, layer.moe_config, w13, w2)
    scratch.w13_weight, scratch.w2_weight = (nn.Parameter(w, requires_grad=False) for w in made)
    method.moe_kernel.fused_experts.process_weights_after_loading(scratch)
    return {"w13_weight": scratch.w13_weight, "w2_weight": scratch.w2_weight}


def _parts(engine: Any, name: str) -> list[str]:
    """Names under which the trainer keeps a layer that vLLM may have merged: qkv_proj is q_proj, k_proj and v_proj."""
    parent, _, leaf = name.rpartition(".")
    return [f"{parent}.{part}" for part in engine.packed_modules_mapping.get(leaf, [leaf])]
