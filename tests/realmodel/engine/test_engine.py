"""A real vLLM on the CPU: sampling, log-probabilities, and weight transfer that is caught when it fails."""

import shutil
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from realmodel.engine import sampler, sync
from realmodel.engine.sampler import EngineConfig, generate
from realmodel.engine.sync import SyncError
from realmodel.policy import model as policy
from realmodel.policy import recipes
from realmodel.policy.align import WHOLE
from sandbox.errors import BadInput
from tests.support.tiny_model import PROMPTS, adamw_step, disagreement, trainer_rows, untrained

DTYPES = ("float32", "bfloat16", "float16")
LONG = [np.random.default_rng(100 + i).integers(2, 64, 140).tolist() for i in range(8)]  # one KV block is 128 tokens


def reload(llm, weights) -> None:
    """What `sync.push` does, without its care: any weights, prefix cache kept."""
    llm.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(weights)})


def detached(named) -> list:
    return [(name, value.detach().clone()) for name, value in named]


# sampling


def test_float32_engine_gives_the_trainers_log_probabilities(engine, model):
    rollout = generate(engine, PROMPTS, n=8, max_new_tokens=16, seed=1)
    d = disagreement(model, rollout)
    assert len(d) > 500
    assert np.abs(d).max() <= 5e-5
    assert np.sqrt(np.mean(d**2)) <= 1e-5
    assert np.std(np.concatenate(rollout.logp)) > 0.5  # the agreement is not that of a flat distribution


def test_whole_vocabulary_is_a_distribution_in_token_order(engine, model):
    rollout = generate(engine, PROMPTS, n=2, max_new_tokens=12, seed=2, top=WHOLE)
    for b, (rows, want) in enumerate(zip(rollout.logp_all, trainer_rows(model, rollout), strict=True)):
        assert rows.dtype == np.float32
        assert rows.shape == (len(rollout.response_ids[b]), 64)
        np.testing.assert_allclose(np.exp(rows.astype(float)).sum(1), 1, atol=1e-5)
        for t, token in enumerate(rollout.response_ids[b]):
            assert rows[t, token] == rollout.logp[b][t]
        np.testing.assert_allclose(rows, want, atol=5e-5)


def test_whole_vocabulary_changes_no_token(engine):
    plain = generate(engine, PROMPTS, n=2, max_new_tokens=12, seed=3)
    whole = generate(engine, PROMPTS, n=2, max_new_tokens=12, seed=3, top=WHOLE)
    assert plain.logp_all is None
    assert plain.response_ids == whole.response_ids
    np.testing.assert_array_equal(np.concatenate(plain.logp), np.concatenate(whole.logp))


def test_seed_decides_the_tokens(engine):
    first, again, other = (generate(engine, PROMPTS, n=4, max_new_tokens=16, seed=s).response_ids for s in (7, 7, 8))
    assert first == again
    assert first != other


def test_equal_prompts_get_different_responses(engine):
    twice = generate(engine, [PROMPTS[0], PROMPTS[0]], n=4, max_new_tokens=16, seed=1).response_ids
    assert len({tuple(r) for r in twice}) == 8  # 16 tokens of several nats each: chance of a tie below 1e-9


def test_responses_come_prompt_by_prompt_and_end_with_eos_or_at_the_limit(engine):
    rollout = generate(engine, PROMPTS, n=16, max_new_tokens=40, seed=4, version=3)
    assert rollout.version == 3
    assert rollout.prompt_index.tolist() == [i for i in range(8) for _ in range(16)]
    assert [PROMPTS[i] for i in rollout.prompt_index] == rollout.prompt_ids
    assert 0 < rollout.finished.sum() < len(rollout.finished)  # both kinds are there
    for response, finished in zip(rollout.response_ids, rollout.finished, strict=True):
        assert 1 not in response[:-1]
        assert response[-1] == 1 if finished else len(response) == 40 and response[-1] != 1


def test_sampled_frequencies_are_the_reported_probabilities(engine):
    """4,000 first tokens against the reported distribution: chi-square below its 1 - 1e-6 quantile."""
    from scipy.stats import chi2

    drawn, p = [], None
    for seed in range(2):
        rollout = generate(engine, [PROMPTS[0]], n=2000, max_new_tokens=1, seed=seed, top=WHOLE if seed == 0 else 0)
        p = np.exp(rollout.logp_all[0][0].astype(float)) if seed == 0 else p
        drawn += [r[0] for r in rollout.response_ids]
    counts, expected = np.bincount(drawn, minlength=64), 4000 * p
    assert expected.min() > 5
    assert ((counts - expected) ** 2 / expected).sum() < chi2.ppf(1 - 1e-6, 63)


def test_trainers_random_state_and_threads_are_its_own(engine):
    torch.manual_seed(5)
    want = torch.rand(3)
    torch.manual_seed(5)
    generate(engine, PROMPTS, n=1, max_new_tokens=4, seed=9)
    assert torch.equal(torch.rand(3), want)
    before = torch.get_num_threads()
    torch.set_num_threads(before + 1)
    after = torch.get_num_threads()
    torch.set_num_threads(before)
    assert after == before + 1


# weight transfer


@pytest.mark.parametrize("dtype", DTYPES)
def test_sync_verify_resample(engines, model, dtype):
    llm = engines(dtype)
    sync.push(llm, model)
    before = generate(llm, PROMPTS, n=4, max_new_tokens=12, seed=1)
    old = policy.snapshot(model)
    for _ in range(20):
        adamw_step(model, 1e-3)
    with pytest.raises(SyncError):
        sync.verify(llm, model, PROMPTS)
    sync.push(llm, model)
    verified = sync.verify(llm, model, PROMPTS)
    after = generate(llm, PROMPTS, n=4, max_new_tokens=12, seed=1)
    # 2 layers of (64 x 256 qkv, 128 x 64 o, 64 x 384 gate_up, 64 columns of 192 x 64 down, norms), lm_head, embedding
    assert verified.weights == 2 * (64 * 256 + 64 * 64 + 64 * 384 + 64 * 64 + 2 * 64 + 2 * 32) + 64 + 2 * 64 * 64
    limit = {"float32": 1e-5, "bfloat16": 0.1, "float16": 0.02}[dtype]
    assert np.sqrt(np.mean(disagreement(model, after) ** 2)) < limit
    stale = recipes.initialise(recipes.Recipe(), recipes.char_tokenizer())
    stale.load_state_dict(old)
    assert np.sqrt(np.mean(disagreement(stale, before) ** 2)) < limit
    assert np.sqrt(np.mean(disagreement(stale, after) ** 2)) > 5 * limit


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_small_update_without_a_push_is_caught(engines, model, dtype):
    llm = engines(dtype)
    sync.push(llm, model)
    adamw_step(model)
    with pytest.raises(SyncError, match="is stale in the engine"):
        sync.verify(llm, model, PROMPTS)


@pytest.mark.parametrize("dtype", DTYPES)
def test_stale_lm_head_is_caught(engines, model, dtype):
    """named_parameters() has no tied lm_head: where the kernel packs it, the output layer stays old in silence."""
    llm = engines(dtype)
    sync.push(llm, model)
    old = model.lm_head.weight.detach().clone()
    adamw_step(model)
    reload(llm, detached(model.named_parameters()))
    assert llm.reset_prefix_cache()
    # Which output layer the engine really uses, seen by a dense input instead of one-hot ones.
    hidden = torch.randn(32, 64, generator=torch.Generator().manual_seed(0)).to(llm.model_config.dtype)
    logits = llm.apply_model(lambda engine: engine.compute_logits(hidden))[0].float()
    far = {
        name: (logits - hidden.float() @ weight.detach().to(hidden.dtype).float().T).square().mean()
        for name, weight in (("old", old), ("new", model.lm_head.weight))
    }
    stale = far["old"] < far["new"]
    if dtype == "float32":
        assert stale
    if stale:
        with pytest.raises(SyncError, match="lm_head is stale"):
            sync.verify(llm, model, PROMPTS)
    else:
        sync.verify(llm, model, PROMPTS)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["lm_head", "model.embed_tokens", "model.layers.1.self_attn.k_proj", "model.norm"])
def test_one_wrong_value_of_a_weight_is_caught(engines, model, dtype, name):
    """The smallest step of the engine's dtype, in one entry of one layer."""
    llm = engines(dtype)
    sync.push(llm, model)
    weight = model.get_submodule(name).weight
    with torch.no_grad():
        entry = weight.view(-1)[7].to(llm.model_config.dtype)
        weight.view(-1)[7] = torch.nextafter(entry, entry + 1).float()
    with pytest.raises(SyncError, match="is stale"):
        sync.verify(llm, model, PROMPTS)


def test_engine_keeps_no_reference_to_the_trainers_weights(engine, model):
    adamw_step(model)
    sync.push(engine, model)
    pushed = policy.snapshot(model)
    adamw_step(model)
    copy = recipes.initialise(recipes.Recipe(), recipes.char_tokenizer())
    copy.load_state_dict(pushed)
    assert sync.verify(engine, copy, PROMPTS).tokens > 0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_stale_prefix_cache_is_caught(engines, model, dtype):
    llm = engines(dtype)
    sync.push(llm, model)
    generate(llm, LONG, n=1, max_new_tokens=2, seed=0)  # fills the cache
    adamw_step(model)
    reload(llm, detached(model.state_dict().items()))
    with pytest.raises(SyncError, match="prefix cache is stale: 128 tokens"):
        sync.verify(llm, model, LONG)
    sync.push(llm, model)
    assert sync.verify(llm, model, LONG).tokens > 0


def test_stale_prefix_cache_gives_wrong_log_probabilities(engine, model):
    generate(engine, LONG, n=1, max_new_tokens=2, seed=0)
    other = untrained(seed=1)
    reload(engine, detached(other.state_dict().items()))
    assert np.abs(disagreement(other, generate(engine, LONG, n=1, max_new_tokens=4, seed=0))).max() > 0.1
    assert engine.reset_prefix_cache()
    assert np.abs(disagreement(other, generate(engine, LONG, n=1, max_new_tokens=4, seed=0))).max() < 5e-5


def test_probe_alone_catches_other_weights(engine, model, monkeypatch):
    adamw_step(model)
    monkeypatch.setattr(sync, "read_back", lambda *args: 0)
    with pytest.raises(SyncError, match="disagree after a sync"):
        sync.verify(engine, model, PROMPTS)


# bad input


def one_line(error) -> bool:
    return "\n" not in str(error.value)


def test_head_dim_that_a_cpu_cannot_serve(tmp_path):
    recipes.initialise(recipes.Recipe(head_dim=16), recipes.char_tokenizer()).save_pretrained(tmp_path)
    with pytest.raises(BadInput, match="head_dim 16 cannot be served") as error:
        sampler.start(tmp_path, EngineConfig())
    assert one_line(error)


@pytest.mark.parametrize(
    ("gone", "message"),
    [(None, "is no folder"), ("config.json", "has no config.json"), ("model.safetensors", "has no weights")],
)
def test_incomplete_folder(folder, tmp_path, gone, message):
    path = tmp_path / "model"
    if gone is not None:
        shutil.copytree(folder, path)
        (path / gone).unlink()
    for use in (lambda: sampler.start(path, EngineConfig()), lambda: policy.load(path)):
        with pytest.raises(BadInput, match=message) as error:
            use()
        assert one_line(error)


def test_unknown_dtype(folder):
    with pytest.raises(BadInput, match="dtype 'float8' is unknown") as error:
        sampler.start(folder, EngineConfig(dtype="float8"))
    assert one_line(error)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("{", "has no usable config.json"),
        ("{}", "has no usable config.json"),
        ('{"model_type": "no-such-model"}', "has no usable config.json"),
        (None, "has no eos_token_id in its config.json"),
    ],
)
def test_damaged_config(folder, tmp_path, config, message):
    copy = shutil.copytree(folder, tmp_path / "copy")
    if config is None:
        text = (copy / "config.json").read_text()
        config = text.replace('"eos_token_id": 1', '"eos_token_id": null')
        assert config != text
    (copy / "config.json").write_text(config)
    with pytest.raises(BadInput, match=message) as error:
        sampler.start(copy, EngineConfig())
    assert one_line(error)


def test_engine_that_does_not_start_says_why(folder):
    with pytest.raises(BadInput, match=r"did not start.*max_model_len") as error:
        sampler.start(folder, EngineConfig(max_model_len=100_000))
    assert one_line(error)


@pytest.mark.parametrize(
    ("prompts", "message"),
    [([], "no prompt"), ([[2], []], r"prompt_ids\[1\] has 0"), ([[2] * 190], r"prompt_ids\[0\] has 190")],
)
def test_prompts_that_do_not_fit(engine, prompts, message):
    with pytest.raises(BadInput, match=message):
        generate(engine, prompts, n=1, max_new_tokens=8, seed=0)


def reported(ids, tokens, values):
    """One response as vLLM reports it, with one log-probability a step."""
    from vllm.logprobs import FlatLogprobs

    steps = list(range(len(values)))
    flat = FlatLogprobs(steps, [s + 1 for s in steps], tokens, values, [1] * len(steps), [None] * len(steps))
    return SimpleNamespace(token_ids=ids, logprobs=flat)


@pytest.mark.parametrize(
    ("outputs", "message"),
    [
        ([reported([5], [5], [-1.0])], "returned 1 responses to prompt 0, expected 2"),
        ([reported([5], [5], [-1.0]), reported([], [], [])], "empty response 1"),
        ([reported([5], [5], [-1.0]), reported([5], [5], [None])], "no log-probability for a token of response 1"),
        ([reported([5, 6], [5], [-1.0]), reported([5], [5], [-1.0])], "no log-probability for a token of response 0"),
        ([reported([5, 6], [5, 7], [-1.0, -2.0])] * 2, "other tokens than it drew in response 0"),
    ],
)
def test_engine_that_answers_wrongly_is_refused(engine, monkeypatch, outputs, message):
    monkeypatch.setattr(engine, "generate", lambda *args, **kwargs: [SimpleNamespace(outputs=outputs)])
    with pytest.raises(BadInput, match=message):
        generate(engine, PROMPTS[:1], n=2, max_new_tokens=4, seed=0)
