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
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import torch
from torch import Tensor, nn

from realmodel.engine import sampler
from realmodel.policy import model as policy
from realmodel.policy import tasks
from realmodel.policy.align import Rollout, pad, part, to_batch, trainers, wanted
from realmodel.policy.logprobs import log_probs_at, log_probs_of_many, pieces
from realmodel.training import record, underway
from realmodel.training.settings import Learner, RunConfig, learner
from realmodel.training.underway import Probe, Run
from sandbox.batch import Batch
from sandbox.corrections import Corrected, losses
from sandbox.errors import BadInput
from sandbox.output import config as configs
from sandbox.output import run_folder

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
    Raises BadInput: an engine that cannot serve the run, a reward that raises, a loss that is not finite; the steps
    before are in the folder, and the run can be resumed.
    """
    held_out = tasks.get(config.task).sample(np.random.default_rng([0, 1]), config.held_out, held_out=True)
    _check(config, llm, learner)
    with run_folder.recorded(folder, configs.resolved(config), resume) as outcome:
        run = underway.begin(config, llm, learner, folder)
        for step in range(run.step, config.steps):
            clock = time.perf_counter()
            problems, rollout = underway.next_batch(run)
            sampled = time.perf_counter()
            rewards = _rewards(learner, problems, rollout, step)
            advantage = normalised(rewards, rollout.prompt_index)
            with torch.no_grad() if config.micro_batch else nullcontext():
                batch = evaluate(learner, rollout, step, run.snapshots, advantage, config.correction.centres)
            corrected = config.correction(batch)
            row = {"step": step, "loss": 0.0}
            row |= record.measured(batch, rollout, rewards, corrected.keep)
            row |= _state(run, held_out, step)
            record.write_rollouts(folder, step, batch, rollout, rewards)
            updating = time.perf_counter()
            # where every token is rejected there is no gradient, and AdamW's momentum must not move the weights alone
            row["skipped"] = not bool((batch.mask & corrected.keep).any())
            row["gradient_norm"] = 0.0
            if not row["skipped"]:
                row["loss"], row["gradient_norm"] = update(config, learner, rollout, batch, corrected, step)
            row["synced"] = config.resync(
                step + 1 - run.at_sync.version, row["batch_ess"], row["batch_ess_se"], row["kl_sampler_train_k3"]
            )
            row |= {"seconds_sampling": sampled - clock, "seconds_update": time.perf_counter() - updating}
            if row["synced"]:
                underway.sync_now(run, version=step + 1)
            row |= {"seconds": time.perf_counter() - clock}
            run.rows.append(row)
            run_folder.write_table(folder / "steps.parquet", pl.DataFrame(run.rows, infer_schema_length=None))
            if (step + 1) % config.checkpoint_every == 0 or step + 1 == config.steps:
                underway.save(run, folder, step + 1)
            progress(row)
        # the state after the last update: what the probe and the held-out problems say of it
        last = {"step": config.steps, "synced": False} | _state(run, held_out, config.steps)
        steps = pl.DataFrame([*run.rows, last], infer_schema_length=None)
        run_folder.write_table(folder / "steps.parquet", steps)
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
        advantage: of each response. (n,)
    """
    ids, _ = pad(rollout, learner.tokenizer.pad_token_id)
    rows, columns = asked(learner, rollout, ids, centre)
    drew = torch.from_numpy(np.concatenate(rollout.versions()))
    old = {}  # before pi: a pass beside the graph of another makes the allocator give memory back and fetch it again
    for other in torch.unique(drew[drew != version]).tolist():
        there = drew == other
        old[other] = log_probs_at(learner.model, ids, rows[there], columns[there], snapshots[other])
    pi = log_probs_at(learner.model, ids, rows, columns)
    mu = pi.detach()
    for other, values in old.items():
        mu = mu.clone().index_put(((drew == other).to(mu.device),), values)
    return to_batch(rollout, ids, advantage, pi, version, mu, centre)


def asked(learner: Learner, rollout: Rollout, ids: Tensor, centre: bool = False) -> tuple[Tensor, Tensor]:
    """`align.wanted` of a padded rollout, for the learner's vocabulary. ids (n, length)"""
    model: Any = learner.model
    return wanted(rollout, ids.shape[1], model.get_input_embeddings().num_embeddings, centre)


@torch.no_grad()
def probe_lag(learner: Learner, probe: Probe | None, version: int) -> dict[str, float]:
    """`record.lag_on_probe` of the live weights, and who drew the probe; nothing where there is none."""
    if probe is None:
        return {}
    ids, _ = pad(probe.rollout, learner.tokenizer.pad_token_id)
    pi = log_probs_of_many(learner.model, ids, *asked(learner, probe.rollout, ids))
    batch = to_batch(probe.rollout, ids, np.zeros(len(ids)), pi, version, probe.mu)
    return {"probe_version": probe.version} | record.lag_on_probe(batch, probe.rollout.prompt_index)


def _check(config: RunConfig, llm: Any, learner: Learner) -> None:
    sampler.can_report(llm, underway.top(config))
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
    return problem.reward(response_ids, learner.tokenizer)


def _passes(run: Run, held_out: list[tasks.Problem], version: int) -> list[float]:
    """Of each held-out problem the probability of passing; where a verifier scores, one response's reward instead."""
    if all(problem.score is None for problem in held_out):
        return policy.pass_probability(run.learner.model, held_out, run.learner.tokenizer).tolist()
    return _rewards(run.learner, held_out, underway.of_live(run, held_out, version), version).tolist()


def _state(run: Run, held_out: list[tasks.Problem], version: int) -> dict:
    return {
        "version_train": version,
        "version_rollout": run.at_sync.version,
        "steps_since_sync": version - run.at_sync.version,
        "sync_max_difference": run.at_sync.max_difference,
        "pass_probability": _passes(run, held_out, version),
        **probe_lag(run.learner, run.probe, version),
    }


def update(
    config: RunConfig, learner: Learner, rollout: Rollout, batch: Batch, corrected: Corrected, step: int
) -> tuple[float, float]:
    """One step of AdamW. Returns the loss and the norm of its gradient before clipping.

    With micro-batches the batch has no gradient: each piece is evaluated again, and its loss divided by the count of
    the whole batch.

    Raises BadInput: a loss or a gradient that is not finite; the weights are as they were.
    """
    learner.optimizer.zero_grad()
    if config.micro_batch:
        loss = sum(_backward_pieces(config, learner, rollout, batch, corrected))
    else:
        whole: Any = losses.reinforce(batch, corrected, config.denominator)
        whole.backward()
        loss = float(whole.detach())
    if not np.isfinite(loss):
        raise BadInput(f"loss is {loss} at step {step}; the steps before it are in the run folder")
    for group in learner.optimizer.param_groups:
        group["lr"] = config.learning_rate * min(1.0, (step + 1) / max(config.warmup, 1))
    norm = nn.utils.clip_grad_norm_(learner.model.parameters(), config.max_grad_norm)
    if not torch.isfinite(norm):
        raise BadInput(f"gradient norm is {float(norm)} at step {step}; the steps before it are in the run folder")
    learner.optimizer.step()
    return loss, float(norm)


def _backward_pieces(
    config: RunConfig, learner: Learner, rollout: Rollout, batch: Batch, corrected: Corrected
) -> Iterator[float]:
    """Adds up the gradient, micro-batch by micro-batch, and yields the loss of each."""
    ids, _ = pad(rollout, learner.tokenizer.pad_token_id)
    centre = config.correction.centres
    count = float(losses.total(batch, batch.mask & corrected.keep, config.denominator, batch.logp_train))
    for piece in pieces(len(ids), config.micro_batch):
        mine = batch.rows(piece)
        pi = log_probs_at(learner.model, ids[piece], *asked(learner, part(rollout, piece), ids[piece], centre))
        here = Corrected(
            corrected.weight[piece],
            corrected.keep[piece],
            corrected.centre[piece] if centre else 0.0,  # type: ignore[index]
        )
        loss: Any = losses.reinforce(replace(mine, **trainers(pi, mine.mask, centre)), here, count)
        loss.backward()
        yield float(loss.detach())
