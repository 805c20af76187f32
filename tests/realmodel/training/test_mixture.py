"""A Qwen3-MoE in a real vLLM on the CPU: its experts arrive with every sync, and a stale one is caught."""

import numpy as np
import pytest
import torch

from realmodel.engine import sampler, sync
from realmodel.engine.sampler import EngineConfig, generate
from realmodel.engine.sync import SyncError
from realmodel.policy import model as policy
from realmodel.policy import recipes
from sandbox.errors import BadInput
from tests.support.tiny_model import PROMPTS, adamw_step, disagreement


@pytest.fixture(scope="module")
def mixture(tmp_path_factory):
    """Folder of a tiny mixture whose logits differ by a few nats."""
    path = tmp_path_factory.mktemp("mixture")
    recipe = recipes.Recipe(experts=4, intermediate=64)
    model = recipes.initialise(recipe, recipes.char_tokenizer())
    with torch.no_grad():
        for parameter in {id(p): p for p in model.parameters() if p.ndim >= 2}.values():
            parameter.mul_(5)
    model.save_pretrained(path)
    recipes.char_tokenizer().save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def started(mixture):
    return {dtype: sampler.start(mixture, EngineConfig(dtype=dtype)) for dtype in ("float32", "bfloat16")}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_experts_arrive_and_a_stale_one_is_named(started, mixture, dtype):
    llm, model = started[dtype], policy.load(mixture)[0]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.25)
    sync.push(llm, model)
    count = sync.verify(llm, model, PROMPTS).weights
    experts = sum(p.numel() for name, p in model.named_parameters() if "experts" in name)
    assert count > experts
    d = disagreement(model, generate(llm, PROMPTS, n=4, max_new_tokens=12, seed=1))
    assert np.median(np.abs(d)) < (1e-5 if dtype == "float32" else 0.05)
    with torch.no_grad():
        model.state_dict()["model.layers.1.mlp.experts.down_proj"][2, 5, 7] += 0.1  # one weight of one expert
    with pytest.raises(SyncError, match=r"layers\.1\.mlp\.experts.*w2_weight is stale"):
        sync.verify(llm, model, PROMPTS)
    sync.push(llm, model)
    sync.verify(llm, model, PROMPTS)
    with torch.no_grad():
        model.state_dict()["model.layers.0.mlp.gate.weight"][1, 3] += 0.1
    with pytest.raises(SyncError, match=r"layers\.0\.mlp\.gate is stale"):
        sync.verify(llm, model, PROMPTS)


def test_experts_that_vllm_reloads_without_packing_are_caught(started, mixture, monkeypatch):
    llm, model = started["float32"], policy.load(mixture)[0]
    monkeypatch.setattr(sync, "_pack_experts", lambda engine: None)
    sync.push(llm, model)
    with pytest.raises(SyncError, match="w13_weight"):
        sync.verify(llm, model, PROMPTS)
    monkeypatch.setattr(sync, "read_back", lambda *args: 0)
    with pytest.raises(SyncError, match="disagree after a sync"):
        sync.verify(llm, model, PROMPTS)
    monkeypatch.undo()
    adamw_step(model)
    sync.push(llm, model)
    assert sync.verify(llm, model, PROMPTS).max_difference < 5e-5


def test_experts_that_vllm_cannot_reload_are_refused(tmp_path):
    recipes.initialise(recipes.Recipe(experts=4, intermediate=48), recipes.char_tokenizer()).save_pretrained(tmp_path)
    with pytest.raises(BadInput, match="moe_intermediate_size 48 cannot be synced on a CPU"):
        sampler.start(tmp_path, EngineConfig())
