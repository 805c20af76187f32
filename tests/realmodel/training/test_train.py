"""The loop on the real engine with a tiny model: versions, snapshots, records, and what it refuses."""

import json
import math
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import numpy as np
import polars as pl
import pytest
import torch

from realmodel.engine import sampler
from realmodel.engine.sampler import EngineConfig
from realmodel.policy import model as policy
from realmodel.policy import tasks
from realmodel.policy.align import Rollout, pad, predicted_by
from realmodel.studies import compare
from realmodel.training import train, underway
from realmodel.training.train import RunConfig
from sandbox.corrections import CORRECTIONS, PRESETS, EveryK, Never
from sandbox.errors import BadInput

TINY = RunConfig(
    steps=3, prompts=4, group=4, probe=24, held_out=6, learning_rate=1e-3, engine=EngineConfig(dtype="float32")
)  # fmt: skip


@pytest.fixture
def llm(engines):
    return engines("float32")


@pytest.fixture
def learner(folder):
    return train.learner(folder, TINY)


@pytest.fixture(autouse=True)
def reward(monkeypatch):
    """An untrained model never sorts; so that updates move it, reward what it does draw."""
    monkeypatch.setattr(train, "_reward", lambda learner, problem, ids: float(ids[0] % 3) - 0.5 * (len(ids) > 8))


def recorded(folder: Path, step: int) -> tuple[pl.DataFrame, Rollout]:
    table = pl.read_parquet(folder / "rollouts" / f"step-{step:06d}.parquet")
    rollout = Rollout(
        prompt_ids=table["prompt_token_ids"].to_list(),
        response_ids=table["token_ids"].to_list(),
        logp=[np.array(x) for x in table["logp_rollout"].to_list()],
        logp_all=None,
        version=table["version_rollout"][0],
        prompt_index=table["prompt_id"].to_numpy(),
        finished=np.ones(len(table), bool),
    )
    return table, rollout


def at(learner, rollout: Rollout, weights: dict) -> np.ndarray:
    """Log-probabilities of the recorded tokens at the given weights, all in one row."""
    ids, attention = pad(rollout, learner.tokenizer.pad_token_id)
    rows, tokens, mask = predicted_by(rollout)
    logp = policy.log_probs(learner.model, ids, attention, weights=weights)
    return logp[torch.arange(len(ids))[:, None], rows, tokens][mask].numpy()


def test_recorded_mu_is_the_samplers_version_and_no_neighbour(llm, learner, tmp_path):
    start = learner.state()
    zero = policy.snapshot(learner.model)
    train.train(TINY, llm, learner, tmp_path / "a")
    learner.restore(start)
    train.train(replace(TINY, steps=1), llm, learner, tmp_path / "b")
    one = policy.snapshot(learner.model)
    for step in (0, 1, 2):
        table, rollout = recorded(tmp_path / "a", step)
        mu, pi = (np.concatenate(table[c].to_list()) for c in ("logp_sync", "logp_train"))
        assert table["version_rollout"].unique().to_list() == [0]
        assert table["version_train"].unique().to_list() == [step]
        np.testing.assert_allclose(at(learner, rollout, zero), mu, atol=1e-6)
        assert np.abs(at(learner, rollout, one) - mu).max() > 1e-3
        if step == 1:
            np.testing.assert_allclose(at(learner, rollout, one), pi, atol=1e-6)
            assert np.abs(pi - mu).max() > 1e-3


def test_steps_say_what_happened(llm, learner, tmp_path):
    config = replace(TINY, steps=4, resync=EveryK(2))
    steps = train.train(config, llm, learner, tmp_path / "run")
    assert steps.equals(pl.read_parquet(tmp_path / "run" / "steps.parquet"))
    assert steps["step"].to_list() == [0, 1, 2, 3, 4]
    assert steps["version_rollout"].to_list() == [0, 0, 2, 2, 4]
    assert steps["steps_since_sync"].to_list() == [0, 1, 0, 1, 0]
    assert steps["synced"].to_list() == [False, True, False, True, False]
    lag = steps["lag"].to_list()
    assert lag[0] < 1e-12 > lag[2]  # mu and pi are the same weights
    assert min(lag[1], lag[3]) > 1e-8
    assert lag[4] is None  # measured after the last update: no batch
    ess = steps["probe_ess"].to_numpy()
    np.testing.assert_allclose(ess[[0, 2, 4]], 1, atol=1e-6)
    assert (ess[[1, 3]] < 1 - 1e-6).all()
    # a float32 engine: the discrepancy is rounding
    assert np.sqrt(steps["discrepancy"].drop_nulls()).max() <= 1e-5
    identity = steps["discrepancy"] + steps["lag"] + steps["cross_term"]
    np.testing.assert_allclose(identity.drop_nulls(), steps["total"].drop_nulls(), rtol=1e-4, atol=1e-12)
    run = json.loads((tmp_path / "run" / "run.json").read_text())
    assert run["status"] == "finished"
    assert run["syncs"] == 2
    assert run["config"]["resync"] == {"preset": "every", "k": 2}


def test_the_seed_decides_everything(llm, learner, tmp_path):
    start = learner.state()
    tables = []
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        learner.restore(start)
        train.train(replace(TINY, seed=seed, steps=2), llm, learner, tmp_path / name)
        tables.append(recorded(tmp_path / name, 1)[0])
    assert tables[0].equals(tables[1])
    assert not tables[0]["token_ids"].equals(tables[2]["token_ids"])


@pytest.mark.parametrize("name", CORRECTIONS)
def test_every_correction_trains(llm, learner, tmp_path, name):
    config = replace(TINY, steps=2, correction=CORRECTIONS[name], probe=0)
    steps = train.train(config, llm, learner, tmp_path / "run")
    assert (steps["gradient_norm"].drop_nulls() > 0).all()
    assert "probe_ess" not in steps.columns


def test_a_used_folder_is_refused_and_untouched(llm, learner, tmp_path):
    (tmp_path / "x").write_text("precious")
    with pytest.raises(BadInput, match="is not empty; a run is never overwritten"):
        train.train(TINY, llm, learner, tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["x"]


def test_a_loss_that_is_not_finite_stops_the_run_and_keeps_the_steps_before(llm, learner, tmp_path, monkeypatch):
    real = train.losses.reinforce

    def broken(batch, corrected, denominator):
        loss = real(batch, corrected, denominator)
        return loss * math.nan if batch.version_train == 1 else loss

    monkeypatch.setattr(train.losses, "reinforce", broken)
    with pytest.raises(BadInput, match="loss is nan at step 1"):
        train.train(TINY, llm, learner, tmp_path / "run")
    assert pl.read_parquet(tmp_path / "run" / "steps.parquet")["step"].to_list() == [0]


def test_advantage_is_normalised_within_each_prompt():
    rewards, prompt = np.array([1.0, 0, 0, 1, 5, 5, 5, 5]), np.array([0, 0, 0, 1, 2, 2, 2, 2])
    sd = math.sqrt(2 / 9)
    expected = [(2 / 3) / sd, (-1 / 3) / sd, (-1 / 3) / sd, 0, 0, 0, 0, 0]
    np.testing.assert_allclose(train.normalised(rewards, prompt), expected, rtol=1e-5)


def test_sequence_kl_against_a_loop(learner):
    one = policy.snapshot(learner.model)
    with torch.no_grad():
        for parameter in learner.model.parameters():
            parameter.add_(0.02 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    two = policy.snapshot(learner.model)
    prompts = [[3, 4, 5], [6, 7, 8]]
    responses = policy.sample(learner.model, prompts, 3, 5, torch.Generator().manual_seed(0), eos=1)
    total = 0.0
    for prompt, response in zip(responses.prompt_ids, responses.response_ids, strict=True):
        for t in range(len(response)):
            row = torch.tensor([prompt + response[:t]])
            p, q = (policy.log_probs(learner.model, row, None, weights=w)[0, -1].double() for w in (two, one))
            total += float((p.exp() * (p - q)).sum()) / len(responses.response_ids)
    assert compare.sequence_kl(learner, responses, two, one) == pytest.approx(total, rel=1e-4)
    assert compare.sequence_kl(learner, responses, two, two) == 0.0
    assert total > 1e-3


def test_stale_run_is_compared_without_error(llm, learner, tmp_path):
    start = learner.state()
    on_policy = []
    for seed in (0, 1):
        learner.restore(start)
        config = replace(TINY, seed=seed, resync=EveryK(1), probe=0)
        on_policy.append(compare.pass_rates(train.train(config, llm, learner, tmp_path / f"on{seed}")))
    learner.restore(start)
    steps = train.train(replace(TINY, resync=Never()), llm, learner, tmp_path / "stale")
    row = compare.summary(steps, on_policy)
    assert row["watched_updates"] == 3
    assert row["syncs"] == 0
    assert 0 <= row["final_pass_rate"] <= 1


def rolled(learner, n: int = 12) -> Rollout:
    """Responses of 1 to 9 tokens, of which one version drew all."""
    prompts = [[2 + int(d) for d in np.random.default_rng(i).integers(0, 10, 5 + i % 3)] for i in range(n)]
    drawn = [
        policy.sample(learner.model, [p], 1, 9, torch.Generator().manual_seed(i), eos=1) for i, p in enumerate(prompts)
    ]
    rollout = Rollout(
        prompt_ids=prompts,
        response_ids=[d.response_ids[0][: 1 + (5 * i) % 9] for i, d in enumerate(drawn)],
        logp=[d.logp[0][: 1 + (5 * i) % 9] for i, d in enumerate(drawn)],
        logp_all=None,
        version=0,
        prompt_index=np.arange(n) // 3,
        finished=np.ones(n, bool),
    )
    ids, _ = pad(rollout, 0)
    rows = policy.log_probs(learner.model, ids, None).detach()
    starts = [len(p) - 1 for p in rollout.prompt_ids]
    tables = [rows[b, s : s + len(r)] for b, (s, r) in enumerate(zip(starts, rollout.response_ids, strict=True))]
    return replace(rollout, logp_all=[t.numpy() for t in tables])


def gradient(config: RunConfig, folder, rollout: Rollout) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradient of one update of moved weights on what the start drew; nothing is clipped, nothing moves."""
    learner = train.learner(folder, config)
    sampled = policy.snapshot(learner.model)
    with torch.no_grad():
        for i, parameter in enumerate(learner.model.parameters()):
            parameter.mul_(1 + 0.02 * (-1) ** i)
    advantage = np.random.default_rng(1).normal(size=len(rollout.logp))
    with torch.no_grad() if config.micro_batch else nullcontext():
        batch = train.evaluate(learner, rollout, 1, {0: sampled}, advantage, config.correction.centres)
    learner.optimizer.step = lambda: None
    loss, _ = train.update(config, learner, rollout, batch, config.correction(batch), 1)
    return loss, {name: p.grad.clone() for name, p in learner.model.named_parameters()}


@pytest.mark.parametrize("denominator", ["fixed", "kept", "responses"])
@pytest.mark.parametrize("name", ["mis", "dlc", "snis"])
def test_micro_batches_add_up_to_the_gradient_of_the_whole_batch(folder, learner, name, denominator):
    """Ragged lengths, pieces of 5, 5 and 2: means of means would be off by a third. snis divides by a batch mean."""
    rollout = rolled(learner)
    config = replace(TINY, correction=PRESETS[name], denominator=denominator, max_grad_norm=math.inf)
    want, whole = gradient(config, folder, rollout)
    got, pieces = gradient(replace(config, micro_batch=5), folder, rollout)
    assert got == pytest.approx(want, rel=1e-4)
    assert max(float(g.abs().max()) for g in whole.values()) > 1e-3
    for parameter, expected in whole.items():
        torch.testing.assert_close(pieces[parameter], expected, rtol=1e-3, atol=1e-5, msg=parameter)


def test_checkpointing_computes_layers_again_to_the_same_gradient(folder, learner, monkeypatch):
    from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP

    calls, forward = [], Qwen3MLP.forward
    monkeypatch.setattr(Qwen3MLP, "forward", lambda self, x: calls.append(torch.is_grad_enabled()) or forward(self, x))
    rollout, counted, found = rolled(learner), {}, {}
    for on in (False, True):
        calls.clear()
        found[on] = gradient(replace(TINY, checkpointing=on), folder, rollout)
        counted[on] = len(calls)
    assert counted[True] == counted[False] + 2  # each of two layers once more
    assert found[True][0] == found[False][0]
    for parameter, expected in found[False][1].items():
        torch.testing.assert_close(found[True][1][parameter], expected, rtol=1e-5, atol=1e-7, msg=parameter)


def test_a_run_in_bfloat16_and_pieces_keeps_float32_weights_and_comes_back(llm, folder, tmp_path):
    config = replace(TINY, trainer_dtype="bfloat16", micro_batch=6, checkpointing=True, correction=CORRECTIONS["dlc"])
    config = replace(config, centre_top=16)

    def interrupt(row):
        if row["step"] == 1:
            raise KeyboardInterrupt

    steps = train.train(config, llm, train.learner(folder, config), tmp_path / "whole")
    assert (steps["gradient_norm"].drop_nulls() > 1e-3).all()
    assert 1e-6 < steps["discrepancy"][0] < 1e-2  # the engine is float32, the trainer's products are not
    with pytest.raises(KeyboardInterrupt):
        train.train(config, llm, train.learner(folder, config), tmp_path / "run", interrupt)
    fresh = train.learner(folder, config)
    again = train.train(config, llm, fresh, tmp_path / "run", resume=True)
    assert {p.dtype for p in fresh.model.parameters()} == {torch.float32}
    assert again["loss"].to_list() == steps["loss"].to_list()


def test_centring_over_the_top_of_all_tokens_is_the_whole_vocabularys(learner, folder, tmp_path):
    """k = 64 = V, in the engine's order, against token-id order. With offsets, for where q is pi, c is pi too."""
    engine = EngineConfig(kind="exact", offset_sd=0.7)
    llm, start, found = sampler.start(folder, engine), learner.state(), {}
    for top in (0, 64, 32, None):
        learner.restore(start)
        rule = CORRECTIONS["none" if top is None else "dlc"]
        config = replace(TINY, steps=1, correction=rule, centre_top=top or 0, probe=0, engine=engine)
        found[top] = train.train(config, llm, learner, tmp_path / str(top))["gradient_norm"][0]
    assert found[64] == pytest.approx(found[0], rel=1e-4)
    assert 1e-4 < abs(found[32] / found[0] - 1) < abs(found[None] / found[0] - 1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"micro_batch": -1}, "micro_batch is -1"),
        ({"centre_top": -2}, "centre_top is -2"),
        ({"trainer_dtype": "float16"}, "trainer_dtype is 'float16'"),
        ({"micro_batch": 4, "engine": EngineConfig(kind="exact")}, "needs the trainer's one shape"),
        ({"trainer_dtype": "bfloat16", "engine": EngineConfig(kind="exact")}, "needs the trainer's one shape"),
    ],
)
def test_settings_of_the_update_that_are_refused(change, message):
    with pytest.raises(BadInput, match=message):
        replace(TINY, **change)


def test_the_pass_rate_of_a_scored_task_is_sampled_from_the_live_weights(llm, learner, tmp_path, monkeypatch):
    """One response a held-out problem from the live weights; then the engine has the weights of its last sync back."""
    task = tasks.get(TINY.task)

    def draw(rng):
        return replace(task.draw(rng), score=lambda text, answer: float(text == answer))

    monkeypatch.setattr(tasks, "get", lambda name: replace(task, draw=draw))
    zero = policy.snapshot(learner.model)
    drawn, of_live = [], underway.of_live

    def watched(run, problems, version):
        rollout = of_live(run, problems, version)
        drawn.append((rollout, at(run.learner, rollout, policy.snapshot(run.learner.model))))
        return rollout

    monkeypatch.setattr(underway, "of_live", watched)
    steps = train.train(replace(TINY, learning_rate=1e-2, warmup=0), llm, learner, tmp_path / "run")
    assert [len(passed) for passed in steps["pass_probability"].to_list()] == [TINY.held_out] * 4
    assert len(drawn) == 4
    for step, ((rollout, live), passed) in enumerate(zip(drawn, steps["pass_probability"].to_list(), strict=True)):
        sampled = np.concatenate(rollout.logp)
        np.testing.assert_allclose(sampled, live, atol=1e-4)
        if step:
            assert np.abs(sampled - at(learner, rollout, zero)).max() > 1e-2  # the lag, not rounding
        rewards = [float(ids[0] % 3) - 0.5 * (len(ids) > 8) for ids in rollout.response_ids]
        assert passed == rewards
    # the batches are still drawn from version 0
    assert steps["version_rollout"].to_list() == [0] * 4
    assert np.sqrt(steps["discrepancy"].drop_nulls()).max() <= 1e-5
    assert steps["lag"][2] > 1e-4
