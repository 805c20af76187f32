"""The exact engine is the trainer to the last bit; an injected offset makes q exactly softmax(logits + offset)."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy.special import log_softmax
from scipy.stats import chi2

from realmodel.engine import exact, sampler, sync
from realmodel.engine.sampler import EngineConfig, extend, generate
from realmodel.engine.sync import SyncError
from realmodel.policy import model as policy
from realmodel.policy import recipes
from realmodel.policy.align import WHOLE, pad, predicted_by
from sandbox.errors import BadInput
from tests.support.tiny_model import PROMPTS, adamw_step, trainer_rows

RAGGED = [prompt[: 3 + i] for i, prompt in enumerate(PROMPTS)]


@pytest.fixture
def exact_engine(folder):
    return sampler.start(folder, EngineConfig(kind="exact"))


def trainer_logp(model, rollout) -> np.ndarray:
    """The trainer's log-probability of every drawn token, from the forward pass it takes its gradient through."""
    ids, _ = pad(rollout, 0)
    rows, tokens, mask = predicted_by(rollout)
    logp = policy.log_probs(model, ids, None)
    assert logp.requires_grad
    return logp.detach()[torch.arange(len(ids))[:, None], rows, tokens][mask].numpy()


@pytest.mark.parametrize("prompts", [PROMPTS, RAGGED])
def test_log_probabilities_are_bitwise_the_trainers(exact_engine, model, prompts):
    for n, seed in ((8, 0), (3, 1)):
        rollout = generate(exact_engine, prompts, n, max_new_tokens=16, seed=seed, top=WHOLE)
        drawn = np.concatenate(rollout.logp)
        assert len(drawn) > 100
        assert np.array_equal(drawn, trainer_logp(model, rollout))  # equal, not close
        for rows, want in zip(rollout.logp_all, trainer_rows(model, rollout), strict=True):
            np.testing.assert_allclose(rows, want, atol=5e-5)  # and they are those of one sequence at a time


def test_drawn_frequencies_are_the_probabilities(exact_engine):
    """4,000 first tokens: chi-square below its 1 - 1e-6 quantile."""
    rollout = generate(exact_engine, [PROMPTS[0]], 4000, 1, seed=0, top=WHOLE)
    expected = 4000 * np.exp(rollout.logp_all[0][0].astype(float))
    counts = np.bincount([r[0] for r in rollout.response_ids], minlength=64)
    assert ((counts - expected) ** 2 / expected).sum() < chi2.ppf(1 - 1e-6, 63)


def test_responses_end_with_eos_or_at_the_limit(exact_engine):
    rollout = generate(exact_engine, PROMPTS, 16, 40, seed=4, version=3)
    assert rollout.version == 3
    assert [PROMPTS[i] for i in rollout.prompt_index] == rollout.prompt_ids
    assert 0 < rollout.finished.sum() < len(rollout.finished)
    for response, finished in zip(rollout.response_ids, rollout.finished, strict=True):
        assert 1 not in response[:-1]
        assert response[-1] == 1 if finished else len(response) == 40 and response[-1] != 1


def test_a_push_is_needed_and_is_enough(exact_engine, model):
    assert sync.verify(exact_engine, model, PROMPTS).max_difference == 0.0
    adamw_step(model)
    with pytest.raises(SyncError, match="is stale in the engine"):
        sync.verify(exact_engine, model, PROMPTS)
    sync.push(exact_engine, model)
    assert sync.verify(exact_engine, model, PROMPTS).rms == 0.0


def test_a_model_whose_rows_see_later_tokens_is_refused(exact_engine, monkeypatch):
    real = policy.log_probs

    def leaky(model, ids, mask, weights=None):
        return real(model, ids, mask, weights) - 1e-7 * ids.float().mean()

    monkeypatch.setattr(exact, "log_probs", leaky)
    with pytest.raises(BadInput, match="does not hold for this model: later tokens change"):
        generate(exact_engine, PROMPTS, 4, 8, seed=0)


@pytest.mark.parametrize("kind", ["vllm", "exact"])
def test_offset_makes_q_the_softmax_of_logits_plus_offset(folder, model, kind):
    llm = sampler.start(folder, EngineConfig(kind=kind, offset_sd=0.5, seed=3, max_model_len=64, max_num_seqs=64))
    offset = np.random.default_rng(3).normal(size=64) * 0.5
    np.testing.assert_allclose(sampler.offset(llm), offset, rtol=1e-6)
    rollout = generate(llm, PROMPTS, 4, 12, seed=1, top=WHOLE)
    plain, shifted = [], []
    for rows, drawn, ids, mu in zip(
        rollout.logp_all, rollout.logp, rollout.response_ids, trainer_rows(model, rollout), strict=True
    ):
        np.testing.assert_allclose(rows, log_softmax(mu + offset, axis=-1), atol=5e-5)
        np.testing.assert_array_equal(drawn, rows[np.arange(len(ids)), ids])
        plain.append(np.abs(rows - mu).max())
        shifted += (drawn - mu[np.arange(len(ids)), ids]).tolist()
    assert min(plain) > 0.5  # the offset is there
    # tokens with a positive offset are drawn more often: it acts on the draw, not only on the report (5 s.e.)
    assert np.mean(shifted) > 5 * np.std(shifted) / np.sqrt(len(shifted)) > 0
    sync.push(llm, model)
    assert sync.verify(llm, model, PROMPTS).max_difference < 5e-5
    drawn = generate(llm, [PROMPTS[0]], 2000, 1, seed=5, top=WHOLE)
    expected = 2000 * np.exp(log_softmax(trainer_rows(model, drawn)[0][0] + offset))
    counts = np.bincount([r[0] for r in drawn.response_ids], minlength=64)
    assert ((counts - expected) ** 2 / expected).sum() < chi2.ppf(1 - 1e-6, 63)


@pytest.mark.parametrize("kind", ["vllm", "exact"])
def test_extend_keeps_what_was_drawn_and_says_which_version_drew_the_rest(folder, engines, model, kind):
    llm = engines("float32") if kind == "vllm" else sampler.start(folder, EngineConfig(kind="exact"))
    sync.push(llm, model)
    first = generate(llm, PROMPTS, 4, 5, seed=1, top=WHOLE, version=7, room=15)
    old = policy.snapshot(model)
    for _ in range(5):
        adamw_step(model, 1e-2)
    sync.push(llm, model)
    second = extend(llm, first, 15, seed=2, version=9)
    assert extend(llm, replace(second, finished=np.ones(32, bool)), 5, seed=3, version=10).response_ids == (
        second.response_ids
    )
    by_version = {7: [], 9: []}
    previous = recipes.initialise(recipes.Recipe(), recipes.char_tokenizer())
    previous.load_state_dict(old)
    rows = {7: trainer_rows(previous, second), 9: trainer_rows(model, second)}
    for b, ids in enumerate(second.response_ids):
        begun = len(first.response_ids[b])
        assert ids[:begun] == first.response_ids[b]
        assert len(ids) == begun if first.finished[b] else begun < len(ids) <= 20
        assert second.versions()[b].tolist() == [7] * begun + [9] * (len(ids) - begun)
        for t, token in enumerate(ids):
            drew = int(second.versions()[b][t])
            by_version[drew].append(second.logp[b][t] - rows[drew][b][t, token])
            assert second.logp_all[b][t, token] == second.logp[b][t]
    assert min(map(len, by_version.values())) > 100
    assert max(np.abs(d).max() for d in by_version.values()) < 5e-5
    other = [second.logp[b][t] - rows[7][b][t, i] for b, r in enumerate(second.response_ids) for t, i in enumerate(r)]
    assert np.abs(other).max() > 1e-2  # the old weights do not explain the new tokens


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kind": "exact", "dtype": "bfloat16"}, "computes as the trainer does"),
        ({"kind": "sglang"}, "engine.kind 'sglang' is unknown"),
        ({"offset_sd": -1.0}, "engine.offset_sd is -1.0"),
    ],
)
def test_settings_that_make_no_sense(settings, message):
    with pytest.raises(BadInput, match=message):
        EngineConfig(**settings)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU may have batch-invariant kernels")
def test_batch_invariance_is_refused_on_a_cpu_with_the_reason(folder):
    with pytest.raises(BadInput, match="Triton kernels, which no CPU runs"):
        sampler.start(folder, EngineConfig(batch_invariant=True))


def test_an_engine_that_cannot_report_what_a_correction_needs(engine, exact_engine, monkeypatch):
    sampler.can_report(exact_engine, top=WHOLE)
    sampler.can_report(engine, top=WHOLE)
    monkeypatch.setattr(engine.model_config, "max_logprobs", 20)
    sampler.can_report(engine, top=20)
    with pytest.raises(BadInput, match="centres the score over 64 tokens, but the engine reports at most 20"):
        sampler.can_report(engine, top=WHOLE)
    with pytest.raises(BadInput, match="centres the score over 21 tokens"):
        sampler.can_report(engine, top=21)
    monkeypatch.setattr(engine.model_config, "logprobs_mode", "raw_logits")
    with pytest.raises(BadInput, match="engine reports raw_logits"):
        sampler.can_report(engine, top=0)
