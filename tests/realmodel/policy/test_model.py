"""The policy without an engine: cache, snapshots, exact pass rates, the trainer's own sampler."""

import json
import math
import os
import subprocess
import sys

import numpy as np
import pytest
import torch

from realmodel.policy import model as policy
from realmodel.policy.tasks import Problem
from sandbox.errors import BadInput
from tests.support.tiny_model import adamw_step, trainer_rows, untrained

QUICK = policy.Recipe(steps=2, batch=4)
IDS = torch.randint(2, 64, (3, 9), generator=torch.Generator().manual_seed(0))


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("MISMATCH_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


# the cache


def test_build_once_then_reuse(cache):
    seen = []
    path = policy.build(QUICK, lambda step, steps, loss: seen.append((step, steps, loss)))
    assert [s[:2] for s in seen] == [(1, 2), (2, 2)]
    assert all(math.isfinite(s[2]) for s in seen)
    assert policy.build(QUICK, lambda *_: pytest.fail("built twice")) == path
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
    first = policy.load(policy.build(QUICK))[0].state_dict()
    assert policy.build(policy.Recipe(steps=2, batch=4, seed=1)) != policy.build(QUICK)
    other = policy.load(policy.build(policy.Recipe(steps=2, batch=4, seed=1)))[0].state_dict()
    monkeypatch.setenv("MISMATCH_CACHE", str(tmp_path / "elsewhere"))
    torch.manual_seed(99)  # the caller's random state has no say
    again = policy.load(policy.build(QUICK))[0].state_dict()
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["lm_head.weight"], other["lm_head.weight"])


@pytest.mark.parametrize("part", policy.PARTS)
def test_a_damaged_cache_is_one_line_that_names_the_part(cache, part):
    path = policy.build(QUICK)
    (path / part).unlink()
    with pytest.raises(BadInput, match=rf"is damaged, {part} is missing: delete the folder"):
        policy.build(QUICK)


def test_a_cache_that_cannot_be_written(cache):
    cache.write_text("a file")
    with pytest.raises(BadInput, match=r"cache .* of the small model cannot be written"):
        policy.build(QUICK)


def test_a_killed_build_leaves_nothing(cache):
    def kill(*_):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        policy.build(QUICK, kill)
    assert list(cache.iterdir()) == []
    assert policy.build(QUICK).is_dir()


def test_training_sees_no_held_out_prompt(monkeypatch):
    drawn = []
    draw = policy.tasks.Task.sample

    def spy(task, rng, n, held_out):
        problems = draw(task, rng, n, held_out)
        drawn.append({policy.tasks.is_held_out(p.prompt) for p in problems})
        return problems

    monkeypatch.setattr(policy.tasks.Task, "sample", spy)
    policy.build(QUICK)
    assert drawn == [{True}, {False}, {False}]  # for the evaluation, and two steps


def test_build_leaves_the_callers_random_state():
    torch.manual_seed(3)
    want = torch.rand(2)
    torch.manual_seed(3)
    policy.build(QUICK)
    assert torch.equal(torch.rand(2), want)


def test_unknown_task_builds_nothing(cache):
    with pytest.raises(BadInput, match="task 'chess' is unknown"):
        policy.build(policy.Recipe(task="chess"))
    assert not cache.exists()


def test_damaged_weights_are_one_line():
    path = policy.build(QUICK)
    (path / "model.safetensors").write_bytes(b"xx")
    with pytest.raises(BadInput, match="cannot be loaded") as error:
        policy.load(path)
    assert "\n" not in str(error.value)


# log-probabilities and snapshots


def test_log_probs_are_the_models_whatever_the_padding():
    model = untrained()
    padded = torch.cat([IDS, torch.zeros(3, 4, dtype=torch.long)], dim=1)
    mask = (torch.arange(13) < 9).long().expand(3, 13)
    got = policy.log_probs(model, padded, mask)[:, :9]
    for b in range(3):
        logits = model(IDS[b : b + 1]).logits[0].double()
        want = logits - logits.exp().sum(-1, keepdim=True).log()
        np.testing.assert_allclose(got[b].detach(), want.detach(), atol=2e-5)
    assert got.requires_grad


def test_snapshot_keeps_its_own_version_and_no_other():
    model = untrained()
    snapshots, values = [], []
    for _ in range(3):
        snapshots.append(policy.snapshot(model))
        values.append(policy.log_probs(model, IDS, None).detach())
        adamw_step(model)
    live = policy.log_probs(model, IDS, None).detach()
    for version, weights in enumerate(snapshots):
        got = policy.log_probs(model, IDS, None, weights=weights)
        assert torch.equal(got, values[version])
        for other in range(3):
            if other != version:
                assert (got - values[other]).abs().max() > 1e-4
        assert not got.requires_grad
    assert torch.equal(policy.log_probs(model, IDS, None).detach(), live)  # the live weights were only borrowed


def test_snapshot_has_the_tied_output_layer_and_it_counts():
    model = untrained()
    weights = policy.snapshot(model)
    assert set(weights) == set(model.state_dict())
    assert weights["lm_head.weight"] is weights["model.embed_tokens.weight"]
    before = weights["lm_head.weight"].clone()
    old = policy.log_probs(model, IDS, None).detach()
    with torch.no_grad():
        model.lm_head.weight.mul_(2)
    assert torch.equal(weights["lm_head.weight"], before)
    assert torch.equal(policy.log_probs(model, IDS, None, weights=weights), old)


# exact pass rates


PROBLEMS = [Problem("12>", "345"), Problem("9876>", "1"), Problem(">", "55555")]


def test_pass_probability_is_the_product_over_answer_and_eos():
    model, tokenizer = untrained(), policy.char_tokenizer()
    got = policy.pass_probability(model, PROBLEMS, tokenizer)
    for i, problem in enumerate(PROBLEMS):
        ids = ["<pad>", "<eos>", *policy.CHARACTERS].index
        sequence = [ids(c) for c in problem.prompt]
        want = 1.0
        for token in [*map(ids, problem.answer), 1]:
            want *= model(torch.tensor([sequence])).logits[0, -1].double().softmax(-1)[token].item()
            sequence.append(token)
        assert got[i].item() == pytest.approx(want, rel=1e-4)
    weights = policy.snapshot(model)
    adamw_step(model, 1e-2)
    assert torch.equal(policy.pass_probability(model, PROBLEMS, tokenizer, weights), got)
    assert not torch.allclose(policy.pass_probability(model, PROBLEMS, tokenizer), got, rtol=1e-2)


def test_greedy_right_follows_the_most_likely_tokens():
    model, tokenizer = untrained(), policy.char_tokenizer()
    prompts = [f"{i:03d}>" for i in range(300)]
    ids = torch.tensor([tokenizer.encode(p) for p in prompts])
    for _ in range(3):
        ids = torch.cat([ids, model(ids).logits[:, -1].argmax(-1, keepdim=True)], dim=1)
    end = ids[:, 6].mode().values.item()  # the random model hardly ever ends: let its favourite third token be eos
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(end)
    problems, want = [], []
    for prompt, tokens in zip(prompts, ids[:, 4:].tolist(), strict=True):
        if min(tokens[:2]) > 1:  # two characters and what follows
            problems.append(Problem(prompt, tokenizer.decode(tokens[:2])))
            want.append(tokens[2] == end)
    assert 0 < sum(want) < len(want)
    assert policy.greedy_right(model, problems, tokenizer).tolist() == want
    wrong = [Problem(p.prompt, p.answer[1] + p.answer[1]) for p in problems if p.answer[0] != p.answer[1]]
    assert not policy.greedy_right(model, wrong, tokenizer).any()


# the trainer's own sampler


def test_own_sampler_reports_its_own_log_probabilities():
    model = untrained()
    prompts = IDS[:2].tolist()
    rollout = policy.sample(model, prompts, 50, 12, torch.Generator().manual_seed(0), eos=1, version=5)
    assert rollout.prompt_ids == [p for p in prompts for _ in range(50)]
    assert rollout.version == 5
    assert rollout.prompt_index.tolist() == [0] * 50 + [1] * 50
    for b, rows in enumerate(trainer_rows(model, rollout)):
        response = rollout.response_ids[b]
        np.testing.assert_allclose(rollout.logp[b], rows[range(len(response)), response], atol=2e-5)
        assert 1 not in response[:-1]
        assert rollout.finished[b] == (response[-1] == 1)
        assert rollout.finished[b] or len(response) == 12
    assert 0 < rollout.finished.sum() < 100
    again = policy.sample(model, prompts, 50, 12, torch.Generator().manual_seed(0), eos=1)
    assert again.response_ids == rollout.response_ids


def test_own_sampler_draws_from_the_policy():
    """20,000 first tokens against the softmax, chi-square below its 1 - 1e-6 quantile."""
    from scipy.stats import chisquare

    model = untrained()
    rollout = policy.sample(model, IDS[:1].tolist(), 20_000, 1, torch.Generator().manual_seed(1), eos=1)
    counts = np.bincount([r[0] for r in rollout.response_ids], minlength=64)
    p = model(IDS[:1]).logits[0, -1].double().softmax(-1).detach().numpy()
    assert (20_000 * p).min() > 5
    assert chisquare(counts, 20_000 * p).pvalue > 1e-6


def test_own_sampler_takes_prompts_of_several_lengths_in_their_order():
    model, prompts = untrained(), [[5, 6, 7], [4], [8, 9, 3], [7]]
    rollout = policy.sample(model, prompts, 3, 6, torch.Generator().manual_seed(0), eos=1)
    assert rollout.prompt_ids == [p for p in prompts for _ in range(3)]
    for b, rows in enumerate(trainer_rows(model, rollout)):
        response = rollout.response_ids[b]
        np.testing.assert_allclose(rollout.logp[b], rows[range(len(response)), response], atol=2e-5)


@pytest.mark.parametrize("prompts", [[], [[]], [[2, 3], []]])
def test_own_sampler_refuses_empty_prompts(prompts):
    with pytest.raises(BadInput, match="no prompt, or one without a token"):
        policy.sample(untrained(), prompts, 1, 4, torch.Generator(), eos=1)


@pytest.mark.slow
def test_default_recipe_is_half_competent(cache):
    record = json.loads((policy.build(policy.Recipe()) / "recipe.json").read_text())
    assert 0.35 < record["pass_probability"] < 0.6
    assert record["greedy_accuracy"] > 0.97


def test_half_built_folders_of_killed_processes_are_deleted(tmp_path):
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    names = {"abandoned": f"sort8-abc.{gone.pid}.x1", "live": f"sort8-abc.{os.getpid()}.x2", "whole": "sort8-abc"}
    for name in names.values():
        (tmp_path / name).mkdir()
    policy._remove_abandoned(tmp_path)
    assert {p.name for p in tmp_path.iterdir()} == {names["live"], names["whole"]}
