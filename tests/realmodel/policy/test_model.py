"""The policy without an engine: cache, snapshots, exact pass rates, the trainer's own sampler."""

import numpy as np
import pytest
import torch

from realmodel.policy import model as policy
from realmodel.policy import recipes
from realmodel.policy.tasks import Problem
from sandbox.errors import BadInput
from tests.support.tiny_model import adamw_step, trainer_rows, untrained

IDS = torch.randint(2, 64, (3, 9), generator=torch.Generator().manual_seed(0))


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
    model, tokenizer = untrained(), recipes.char_tokenizer()
    got = policy.pass_probability(model, PROBLEMS, tokenizer)
    for i, problem in enumerate(PROBLEMS):
        ids = ["<pad>", "<eos>", *recipes.CHARACTERS].index
        sequence = [ids(c) for c in problem.prompt]
        want = 1.0
        for token in [*map(ids, problem.answer), 1]:
            want *= model(torch.tensor([sequence])).logits[0, -1].double().softmax(-1)[token].item()
            sequence.append(token)
        assert got[i].item() == pytest.approx(want, rel=1e-4)
    adamw_step(model, 1e-2)
    assert not torch.allclose(policy.pass_probability(model, PROBLEMS, tokenizer), got, rtol=1e-2)


def test_greedy_right_follows_the_most_likely_tokens():
    model, tokenizer = untrained(), recipes.char_tokenizer()
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
