"""Where lag comes from: every token's version, its trainer snapshot, and what an exact sampler makes of it."""

import json
import math
from dataclasses import replace

import numpy as np
import polars as pl
import pytest
import torch

from realmodel.engine import sampler
from realmodel.engine.sampler import EngineConfig
from realmodel.policy import model as policy
from realmodel.policy.align import pad_ids
from realmodel.training import train
from realmodel.training.train import RunConfig
from sandbox.corrections import CORRECTIONS, EveryK, KlAbove, Mask, Never
from sandbox.errors import BadInput
from tests.support import kill_me

TINY = RunConfig(
    steps=5, prompts=4, group=4, probe=0, held_out=6, learning_rate=1e-3, engine=EngineConfig(kind="exact")
)  # fmt: skip


@pytest.fixture(autouse=True)
def reward(monkeypatch):
    monkeypatch.setattr(train, "_reward", kill_me.reward)


@pytest.fixture(scope="module")
def exact_engine(folder):
    return sampler.start(folder, TINY.engine)


@pytest.fixture
def learner(folder):
    return train.learner(folder, TINY)


def followed(config, llm, learner, out) -> tuple[pl.DataFrame, list[pl.DataFrame], list[dict]]:
    """A run's steps, its rollout tables, and the trainer's weights of every version."""
    weights = [policy.snapshot(learner.model)]
    steps = train.train(config, llm, learner, out, lambda row: weights.append(policy.snapshot(learner.model)))
    return steps, [pl.read_parquet(path) for path in sorted((out / "rollouts").iterdir())], weights


def logp_at(learner, table: pl.DataFrame, weights: dict) -> list[list[float]]:
    """log-probability of each recorded token at some weights."""
    pairs = list(zip(table["prompt_token_ids"].to_list(), table["token_ids"].to_list(), strict=True))
    logp = policy.log_probs(learner.model, *pad_ids([p + ids for p, ids in pairs], 0), weights=weights).tolist()
    return [
        [logp[b][len(prompt) - 1 + t][token] for t, token in enumerate(ids)] for b, (prompt, ids) in enumerate(pairs)
    ]


def test_an_exact_sampler_has_no_mismatch_at_any_step(exact_engine, learner, tmp_path):
    steps = train.train(replace(TINY, resync=EveryK(1)), exact_engine, learner, tmp_path / "run")
    assert (steps["gradient_norm"].drop_nulls() > 1e-3).all()  # it does learn
    for name in ("kl_sampler_train_k1", "kl_sampler_train_k2", "kl_sampler_train_k3", "discrepancy", "lag", "total"):
        assert steps[name].drop_nulls().to_list() == [0.0] * 5, name
    np.testing.assert_allclose(steps["batch_ess"].drop_nulls(), 1, rtol=1e-12)  # rounding of its logsumexp
    assert steps["sync_max_difference"].to_list() == [0.0] * 6


def test_stale_weights_are_lag_and_no_discrepancy_with_an_exact_sampler(exact_engine, learner, tmp_path):
    steps = train.train(replace(TINY, resync=Never()), exact_engine, learner, tmp_path / "run")
    assert steps["discrepancy"].drop_nulls().to_list() == [0.0] * 5
    assert (steps["lag"].drop_nulls().to_numpy()[1:] > 1e-8).all()


def test_a_probe_that_is_kept_sees_the_whole_way_and_comes_back_on_resume(folder, exact_engine, learner, tmp_path):
    """Until the second update the sampler's weights do not matter: it is the probe of a run that never syncs."""
    stale = replace(TINY, probe=16, resync=Never())
    kept = replace(stale, resync=EveryK(1), probe_kept=True)
    start = learner.state()
    ess = {}
    for name, config in (("stale", stale), ("kept", kept), ("redrawn", replace(kept, probe_kept=False))):
        learner.restore(start)
        steps = train.train(config, exact_engine, learner, tmp_path / name)
        ess[name] = steps["probe_ess"].to_numpy()
        assert steps["probe_version"].to_list() == (list(range(6)) if name == "redrawn" else [0] * 6)
    assert ess["kept"][:2].tolist() == ess["stale"][:2].tolist()
    assert abs(ess["kept"][2:] - ess["stale"][2:]).min() > 1e-6
    assert ess["kept"][1:].max() < 1 - 1e-6
    np.testing.assert_allclose(ess["redrawn"], 1, rtol=1e-12)

    def interrupt(row):
        if row["step"] == 2:
            raise KeyboardInterrupt

    learner.restore(start)
    with pytest.raises(KeyboardInterrupt):
        train.train(kept, exact_engine, learner, tmp_path / "cut", interrupt)
    again = train.train(kept, exact_engine, train.learner(folder, TINY), tmp_path / "cut", resume=True)
    assert again["probe_ess"].to_list() == ess["kept"].tolist()


@pytest.mark.parametrize("kind", ["exact", "vllm"])
def test_constant_lag(engines, exact_engine, learner, tmp_path, kind):
    llm = engines("float32") if kind == "vllm" else exact_engine
    config = replace(TINY, resync=EveryK(1), delay=2)
    steps, tables, weights = followed(config, llm, learner, tmp_path / "run")
    assert steps["updates_behind"].drop_nulls().to_list() == [0, 1, 2, 2, 2]
    for step, table in enumerate(tables):
        assert table["version_rollout"].unique().to_list() == [max(0, step - 2)]
        mu, q = (np.concatenate(table[name].to_list()) for name in ("logp_sync", "logp_rollout"))
        right = np.concatenate(logp_at(learner, table, weights[max(0, step - 2)]))
        np.testing.assert_allclose(mu, right, atol=2e-5)
        np.testing.assert_allclose(q, right, atol=5e-5)
        if kind == "exact":
            assert np.array_equal(mu, q)
        if step:
            assert np.abs(np.concatenate(logp_at(learner, table, weights[max(0, step - 2) + 1])) - mu).max() > 1e-3


@pytest.mark.parametrize("kind", ["exact", "vllm"])
def test_a_response_mixes_versions_and_every_token_knows_its_own(engines, exact_engine, learner, tmp_path, kind):
    llm = engines("float32") if kind == "vllm" else exact_engine
    config = replace(TINY, resync=EveryK(1), delay=2, segment=3, correction=CORRECTIONS["dlc"])
    _, tables, weights = followed(config, llm, learner, tmp_path / "run")
    for step, table in enumerate(tables):
        at = [logp_at(learner, table, w) for w in weights]
        worst = np.zeros(len(weights))
        for b, row in enumerate(table.iter_rows(named=True)):
            n = len(row["token_ids"])
            # three tokens at each of the two steps of waiting, the rest when used; nothing waits before the start
            want = [max(0, step - 2)] * 3 + [max(0, step - 1)] * 3 + [step] * 3
            if step < 2:  # drafted at the start: it had fewer steps to wait
                want = [0] * 9 if step == 0 else [0] * 3 + [1] * 6
            assert row["version_rollout"] == want[:n]
            for t, version in enumerate(row["version_rollout"]):
                assert row["logp_sync"][t] == pytest.approx(at[version][b][t], abs=2e-5)
                assert row["logp_rollout"][t] == pytest.approx(at[version][b][t], abs=5e-5)
                worst = np.maximum(worst, [abs(w[b][t] - row["logp_sync"][t]) for w in at])
            if kind == "exact":
                assert row["logp_sync"] == row["logp_rollout"]
        if step > 1:
            assert worst.min() > 1e-3  # no single version explains the batch


def test_sync_by_token_kl(exact_engine, learner, tmp_path):
    start = learner.state()
    free = train.train(replace(TINY, resync=Never()), exact_engine, learner, tmp_path / "free")
    k3 = free["kl_sampler_train_k3"].to_list()
    threshold = (k3[2] + k3[3]) / 2
    assert max(k3[:3]) < threshold < k3[3]
    learner.restore(start)
    steps = train.train(replace(TINY, resync=KlAbove(threshold)), exact_engine, learner, tmp_path / "run")
    assert steps["synced"].to_list()[:4] == [False, False, False, True]
    assert steps["version_rollout"][4] == 4


def test_a_batch_without_a_kept_token_moves_nothing_and_is_counted(exact_engine, learner, tmp_path):
    before = policy.snapshot(learner.model)
    # a ratio of 1, on-policy, is outside [1.5, 2]
    config = replace(TINY, steps=2, resync=EveryK(1), correction=Mask(low=1.5, high=2.0))
    steps = train.train(config, exact_engine, learner, tmp_path / "run")
    assert steps["skipped"].drop_nulls().to_list() == [True, True]
    assert steps["rejected"].drop_nulls().to_list() == [1.0, 1.0]
    assert all(torch.equal(value, before[name]) for name, value in learner.model.state_dict().items())
    run = json.loads((tmp_path / "run" / "run.json").read_text())
    assert (run["status"], run["updates_skipped"]) == ("finished", 2)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (ZeroDivisionError("no units"), "reward of response 3 at step 2 raised ZeroDivisionError: no units"),
        (math.nan, "reward of response 3 at step 2 is nan"),
        (None, "reward of response 3 at step 2 raised TypeError"),
    ],
)
def test_a_reward_that_fails_is_one_line_and_the_run_can_go_on(
    exact_engine, learner, tmp_path, monkeypatch, bad, message
):
    calls = []

    def reward(learner, problem, ids):
        calls.append(1)
        if len(calls) == 2 * 16 + 4:
            if isinstance(bad, Exception):
                raise bad
            return bad
        return kill_me.reward(learner, problem, ids)

    start = learner.state()
    monkeypatch.setattr(train, "_reward", reward)
    with pytest.raises(BadInput, match=message) as error:
        train.train(TINY, exact_engine, learner, tmp_path / "run")
    assert "\n" not in str(error.value)
    assert pl.read_parquet(tmp_path / "run" / "steps.parquet")["step"].to_list() == [0, 1]
    assert json.loads((tmp_path / "run" / "run.json").read_text())["status"] == "failed"
    learner.restore(start)
    resumed = train.train(TINY, exact_engine, learner, tmp_path / "run", resume=True)
    learner.restore(start)
    monkeypatch.setattr(train, "_reward", kill_me.reward)
    whole = train.train(TINY, exact_engine, learner, tmp_path / "whole")
    timed = ("seconds", "seconds_sampling", "seconds_update")
    assert resumed.drop(timed).equals(whole.drop(timed))


def test_engine_and_trainer_of_two_vocabularies(exact_engine, learner, tmp_path):
    with pytest.raises(BadInput, match="engine draws from 65 tokens, the trainer's model has 64"):
        train.train(TINY, replace(exact_engine, vocabulary=65), learner, tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"delay": -1}, "delay is -1, expected at least 0"),
        ({"segment": 2}, "segment is 2 but delay is 0"),
        ({"checkpoint_every": 0}, "checkpoint_every is 0, expected at least 1"),
    ],
)
def test_settings_that_make_no_sense(settings, message):
    with pytest.raises(BadInput, match=message):
        RunConfig(**settings)
