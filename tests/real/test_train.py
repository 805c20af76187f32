"""The loop on the real engine with a tiny model: versions, snapshots, records, and what it refuses."""

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import polars as pl
import pytest
import torch

from realmodel import compare, train
from realmodel import model as policy
from realmodel.align import Rollout, pad, predicted_by
from realmodel.sampler import EngineConfig
from realmodel.train import RunConfig
from sandbox.corrections import CORRECTIONS
from sandbox.errors import BadInput
from sandbox.mismatch import EveryK, Never

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
    assert np.sqrt(steps["discrepancy"].drop_nulls()).max() <= 1e-5  # type: ignore[operator]
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
