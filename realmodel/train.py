"""The real-model loop on one screen: sample with vLLM, correct, update in PyTorch, sync when the rule says so.

It is GRPO with one update a batch and no clipping of its own: advantages are normalised within the responses of a
prompt, the surrogate is `losses.reinforce`, and whatever is to be done about off-policy samples is the correction's.
Versions count steps since the start of the run. Before every update the trainer is evaluated at its own weights (pi),
at the weights that drew each token from their snapshots (mu), and, on a fixed probe of responses drawn at the last
sync, the sequence ESS of the lag is measured: a training batch is too small to date a collapse.

Lag has three sources: the rule of `resync`; `delay`, batches that wait in a queue; and `segment`, responses drawn a
piece a step while they wait, so that one response mixes versions. A run that was killed goes on from its last whole
step with the same random streams (checkpoint.py).
"""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import torch
from torch import Tensor, nn

from realmodel import model as policy
from realmodel import record, sampler, tasks, underway
from realmodel.align import Rollout, pad, to_batch
from realmodel.settings import Learner, RunConfig, learner
from realmodel.underway import Probe, Run
from sandbox import config as configs
from sandbox import losses, results
from sandbox.batch import Batch
from sandbox.errors import BadInput

__all__ = ["Learner", "RunConfig", "evaluate", "learner", "normalised", "probe_lag", "train"]

COUNTED = {"syncs": "synced", "updates_skipped": "skipped"}  # in run.json


def train(
    config: RunConfig,
    llm: Any,
    learner: Learner,
    folder: Path,
    progress: Callable[[dict], None] = lambda row: None,
    resume: bool = False,
) -> pl.DataFrame:
    """Run `config.steps` updates and record them in `folder` (made here, never reused).

    Args:
        llm: an engine of the same model (`sampler.start`); it is synced first.
        learner: updated in place.
        progress: called with every row of the steps table.
        resume: go on from the last whole step of a run in `folder`, where there is one.
    Returns:
        steps: one row an update, measured before it but for `gradient_norm`, `synced` and the seconds, and one after
        the last.
    Raises:
        BadInput: an engine that cannot serve the run, a reward that raises, a loss that is not finite; the steps before
            are in the folder, and the run can be resumed.
    """
    held_out = tasks.get(config.task).sample(np.random.default_rng([0, 1]), config.held_out, held_out=True)
    _check(config, llm, learner)
    with results.recorded(folder, configs.resolved(config), resume) as outcome:
        run = underway.begin(config, llm, learner, folder)
        for step in range(run.step, config.steps):
            clock = time.perf_counter()
            problems, rollout = underway.next_batch(config, llm, learner, run)
            sampled = time.perf_counter()
            rewards = _rewards(learner, problems, rollout, step)
            advantage = normalised(rewards, rollout.prompt_index)
            batch = evaluate(learner, rollout, step, run.snapshots, advantage, config.correction.centres)
            corrected = config.correction(batch)
            loss = losses.reinforce(batch, corrected, config.denominator)
            row = {"step": step, "loss": float(loss.detach())}
            row |= record.measured(batch, rollout, rewards, corrected.keep)
            row |= _state(learner, run, held_out, step)
            record.write_rollouts(folder, step, batch, rollout, rewards)
            updating = time.perf_counter()
            # where every token is rejected there is no gradient, and AdamW's momentum must not move the weights alone
            row["skipped"] = not bool((batch.mask & corrected.keep).any())
            row["gradient_norm"] = 0.0 if row["skipped"] else _update(config, learner, loss, step)
            row["synced"] = config.resync(
                step + 1 - run.at_sync.version, row["batch_ess"], row["batch_ess_se"], row["kl_sampler_train_k3"]
            )
            row |= {"seconds_sampling": sampled - clock, "seconds_update": time.perf_counter() - updating}
            if row["synced"]:
                underway.sync_now(config, llm, learner, run, version=step + 1)
            row |= {"seconds": time.perf_counter() - clock}
            run.rows.append(row)
            results.write_table(folder / "steps.parquet", pl.DataFrame(run.rows, infer_schema_length=None))
            if (step + 1) % config.checkpoint_every == 0 or step + 1 == config.steps:
                underway.save(folder, learner, run, step + 1)
            progress(row)
        # the state after the last update: what the probe and the held-out problems say of it
        last = {"step": config.steps, "synced": False} | _state(learner, run, held_out, config.steps)
        steps = pl.DataFrame([*run.rows, last], infer_schema_length=None)
        results.write_table(folder / "steps.parquet", steps)
        outcome |= {name: sum(row[key] for row in run.rows) for name, key in COUNTED.items()}
    return steps


def normalised(rewards: np.ndarray, prompt_index: np.ndarray) -> np.ndarray:
    """GRPO's advantage: (R - mean) / (sd + 1e-6) within the responses of each prompt. (B,)"""
    advantage = np.zeros_like(rewards)
    for prompt in np.unique(prompt_index):
        mine = prompt_index == prompt
        advantage[mine] = (rewards[mine] - rewards[mine].mean()) / (rewards[mine].std() + 1e-6)
    return advantage


def evaluate(
    learner: Learner,
    rollout: Rollout,
    version: int,
    snapshots: dict[int, dict[str, Tensor]],
    advantage: np.ndarray,
    centre: bool = False,
) -> Batch:
    """The Batch of a rollout: pi at the live weights, with gradient, and mu at those that drew each token.

    Padding is on the right, where no row sees it: without an attention mask every batch takes the same kernels.

    Args:
        version: of the live weights.
        snapshots: weights by version, of every one that drew a token but for `version` itself.
    """
    ids, _ = pad(rollout, learner.tokenizer.pad_token_id)
    pi = policy.log_probs(learner.model, ids, None)

    def at(drew: int) -> Tensor:
        return pi.detach() if drew == version else policy.log_probs(learner.model, ids, None, weights=snapshots[drew])

    if rollout.token_versions is None:
        return to_batch(rollout, ids, advantage, pi, version, sync_all=at(rollout.version), centre=centre)
    rows = torch.full(ids.shape, int(rollout.token_versions[0][0]))
    for b, row in enumerate(rollout.token_versions):
        rows[b, len(rollout.prompt_ids[b]) - 1 :][: len(row)] = torch.as_tensor(row)
    first, *others = torch.unique(rows).tolist()
    mu = at(first)
    for other in others:
        mu = torch.where((rows == other).to(mu.device)[..., None], at(other), mu)
    return to_batch(rollout, ids, advantage, pi, version, sync_all=mu, centre=centre)


@torch.no_grad()
def probe_lag(learner: Learner, probe: Probe | None, version: int) -> dict[str, float]:
    """`record.lag_on_probe` of the live weights, and who drew the probe; nothing where there is none."""
    if probe is None:
        return {}
    ids, _ = pad(probe.rollout, learner.tokenizer.pad_token_id)
    pi = policy.log_probs(learner.model, ids, None)
    batch = to_batch(probe.rollout, ids, np.zeros(len(ids)), pi, version, sync_all=probe.mu)
    return {"probe_version": probe.version} | record.lag_on_probe(batch, probe.rollout.prompt_index)


def _check(config: RunConfig, llm: Any, learner: Learner) -> None:
    sampler.can_report(llm, config.correction.centres)
    model: Any = learner.model
    rows = model.get_input_embeddings().num_embeddings
    if sampler.vocabulary(llm) != rows:
        raise BadInput(f"engine draws from {sampler.vocabulary(llm)} tokens, the trainer's model has {rows}")


def _rewards(learner: Learner, problems: list[tasks.Problem], rollout: Rollout, step: int) -> np.ndarray:
    """One reward a response. (B,)  Raises BadInput where the task's reward does, or gives no finite number."""
    rewards = []
    for i, ids in zip(rollout.prompt_index, rollout.response_ids, strict=True):
        try:
            rewards.append(float(_reward(learner, problems[i], ids)))
        except Exception as error:  # whatever a reward function raises
            message = f"{type(error).__name__}: {policy.one_line(error)}"
            raise BadInput(f"reward of response {len(rewards)} at step {step} raised {message}") from error
        if not np.isfinite(rewards[-1]):
            raise BadInput(f"reward of response {len(rewards) - 1} at step {step} is {rewards[-1]}")
    return np.array(rewards)


def _reward(learner: Learner, problem: tasks.Problem, response_ids: list[int]) -> float:
    return tasks.reward(response_ids, learner.tokenizer.encode(problem.answer), learner.tokenizer.eos_token_id)


def _state(learner: Learner, run: Run, held_out: list[tasks.Problem], version: int) -> dict:
    return {
        "version_train": version,
        "version_rollout": run.at_sync.version,
        "steps_since_sync": version - run.at_sync.version,
        "sync_max_difference": run.at_sync.max_difference,
        "pass_probability": policy.pass_probability(learner.model, held_out, learner.tokenizer).tolist(),
        **probe_lag(learner, run.probe, version),
    }


def _update(config: RunConfig, learner: Learner, loss: Tensor, step: int) -> float:
    if not torch.isfinite(loss):
        raise BadInput(f"loss is {float(loss.detach())} at step {step}; the steps before it are in the run folder")
    for group in learner.optimizer.param_groups:
        group["lr"] = config.learning_rate * min(1.0, (step + 1) / max(config.warmup, 1))
    learner.optimizer.zero_grad()
    loss.backward()
    norm = nn.utils.clip_grad_norm_(learner.model.parameters(), config.max_grad_norm)
    if not torch.isfinite(norm):
        raise BadInput(f"gradient norm is {float(norm)} at step {step}; the steps before it are in the run folder")
    learner.optimizer.step()
    return float(norm)
