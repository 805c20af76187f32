"""The small policies: the cache, what is shipped, and that a recipe decides the weights."""

import json
import math
import os
import shutil
import subprocess
import sys

import pytest
import torch

from realmodel.policy import model as policy
from realmodel.policy import recipes, small, tasks
from sandbox.errors import BadInput

QUICK = recipes.Recipe(steps=2, batch=4)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("MISMATCH_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


# the cache


def test_build_once_then_reuse(cache):
    seen = []
    path = small.build(QUICK, lambda step, steps, loss: seen.append((step, steps, loss)))
    assert [s[:2] for s in seen] == [(1, 2), (2, 2)]
    assert all(math.isfinite(s[2]) for s in seen)
    assert small.build(QUICK, lambda *_: pytest.fail("built twice")) == path
    record = json.loads((path / "recipe.json").read_text())
    assert record["recipe"]["steps"] == 2
    assert 0 <= record["pass_probability"] <= 1
    assert [p.name for p in cache.iterdir()] == [path.name]
    model, tokenizer = policy.load(path)
    assert tokenizer.encode("31>") == [5, 3, 39]
    assert tokenizer.eos_token_id == 1
    assert tokenizer.decode([5, 3, 39]) == "31>"
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert len(tokenizer) == 64


def test_a_recipe_decides_the_weights(monkeypatch, tmp_path):
    first = policy.load(small.build(QUICK))[0].state_dict()
    assert small.build(recipes.Recipe(steps=2, batch=4, seed=1)) != small.build(QUICK)
    other = policy.load(small.build(recipes.Recipe(steps=2, batch=4, seed=1)))[0].state_dict()
    monkeypatch.setenv("MISMATCH_CACHE", str(tmp_path / "elsewhere"))
    torch.manual_seed(99)  # the caller's random state has no say
    again = policy.load(small.build(QUICK))[0].state_dict()
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["lm_head.weight"], other["lm_head.weight"])


@pytest.mark.parametrize("part", small.PARTS)
def test_a_damaged_cache_is_one_line_that_names_the_part(cache, part):
    path = small.build(QUICK)
    (path / part).unlink()
    with pytest.raises(BadInput, match=rf"is damaged, {part} is missing: delete the folder"):
        small.build(QUICK)


def test_a_cache_that_cannot_be_written(cache):
    cache.write_text("a file")
    with pytest.raises(BadInput, match=r"cache .* of the small model cannot be written"):
        small.build(QUICK)


def test_a_killed_build_leaves_nothing(cache):
    def kill(*_):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        small.build(QUICK, kill)
    assert list(cache.iterdir()) == []
    assert small.build(QUICK).is_dir()


def test_training_sees_no_held_out_prompt(monkeypatch):
    drawn = []
    draw = tasks.Task.sample

    def spy(task, rng, n, held_out):
        problems = draw(task, rng, n, held_out)
        drawn.append({tasks.is_held_out(p.prompt) for p in problems})
        return problems

    monkeypatch.setattr(tasks.Task, "sample", spy)
    small.build(QUICK)
    assert drawn == [{True}, {False}, {False}, {True}]  # spelling, two steps, the evaluation


def test_build_leaves_the_callers_random_state():
    torch.manual_seed(3)
    want = torch.rand(2)
    torch.manual_seed(3)
    small.build(QUICK)
    assert torch.equal(torch.rand(2), want)


def test_unknown_task_builds_nothing(cache):
    with pytest.raises(BadInput, match="task 'chess' is unknown"):
        small.build(recipes.Recipe(task="chess"))
    assert not cache.exists()


def test_damaged_weights_are_one_line():
    path = small.build(QUICK)
    (path / "model.safetensors").write_bytes(b"xx")
    with pytest.raises(BadInput, match="cannot be loaded") as error:
        policy.load(path)
    assert "\n" not in str(error.value)


# what is shipped


@pytest.mark.parametrize("task", small.SHIPPED_TASKS)
def test_shipped_models_are_those_of_their_recipes(cache, task):
    path = small.resolve("small", task)
    assert path == small.SHIPPED / task
    assert not cache.exists()
    record = json.loads((path / "recipe.json").read_text())
    assert record["recipe"]["task"] == task
    model, tokenizer = policy.load(path)
    held_out = small._held_out(small.recipe_of("small", task))
    rate = float(policy.pass_probability(model, held_out, tokenizer).mean())
    assert rate == pytest.approx(record["pass_probability"], abs=1e-4)
    assert 0.3 < rate < 0.55
    assert policy.greedy_right(model, held_out, tokenizer).float().mean() >= 0.99


def test_another_recipe_of_a_shipped_task_is_built(cache):
    assert small.build(QUICK).parent == cache


@pytest.mark.parametrize("part", small.PARTS)
def test_shipped_weights_that_do_not_match_their_hash(monkeypatch, tmp_path, part):
    shutil.copytree(small.SHIPPED / "sort8", tmp_path / "sort8")
    monkeypatch.setattr(small, "SHIPPED", tmp_path)
    assert small.resolve("small", "sort8") == tmp_path / "sort8"
    whole = (tmp_path / "sort8" / part).read_bytes()
    (tmp_path / "sort8" / part).write_bytes(whole.replace(b'"sha256": "', b'"sha256": "0') + b"\n")
    with pytest.raises(BadInput, match=r"shipped model .*sort8 is damaged, its hash is not that of recipe\.json"):
        small.resolve("small", "sort8")
    (tmp_path / "sort8" / part).write_bytes(b"")
    with pytest.raises(BadInput, match=r"shipped model .*sort8 is damaged"):
        small.resolve("small", "sort8")


@pytest.mark.slow
@pytest.mark.parametrize("task", small.SHIPPED_TASKS)
def test_a_rebuilt_model_passes_as_often_as_the_shipped_one(monkeypatch, tmp_path, task):
    """Rounding differs between machines, and training carries it away: pass rates agree, to .06, weights do not."""
    shipped = json.loads((small.SHIPPED / task / "recipe.json").read_text())
    again = small.make(small.recipe_of("small", task), tmp_path)
    assert again["pass_probability"] == pytest.approx(shipped["pass_probability"], abs=0.06)
    assert again["greedy_accuracy"] >= 0.99


def test_half_built_folders_of_killed_processes_are_deleted(tmp_path):
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    names = {"abandoned": f"sort8-abc.{gone.pid}.x1", "live": f"sort8-abc.{os.getpid()}.x2", "whole": "sort8-abc"}
    for name in names.values():
        (tmp_path / name).mkdir()
    small._remove_abandoned(tmp_path)
    assert {p.name for p in tmp_path.iterdir()} == {names["live"], names["whole"]}
