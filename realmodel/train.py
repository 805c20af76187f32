"""The real-model loop on one screen: sample with vLLM, correct, update in PyTorch, sync when the rule says so.

It is GRPO with one update a batch and no clipping of its own: advantages are normalised within the responses of a
prompt, the surrogate is `losses.reinforce`, and whatever is to be done about off-policy samples is the correction's.
Versions count optimiser updates since the start of the run. Before every update the trainer is evaluated at its own
weights (pi), at the sampler's weights from a snapshot (mu), and, on a fixed probe of responses drawn at the last sync,
the sequence ESS of the lag is measured: a training batch is too small to date a collapse.
"""

import time
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import torch
from torch import Tensor, nn

from realmodel import model as policy
from realmodel import sampler, sync, tasks
from realmodel.align import Rollout, pad, to_batch
from realmodel.sampler import EngineConfig
from sandbox import config as configs
from sandbox import diagnostics, losses, results
from sandbox.batch import Batch
from sandbox.corrections import CORRECTIONS, Correction
from sandbox.errors import BadInput
from sandbox.mismatch import RESYNCS, Resync

VERIFIED = 8  # responses compared after every sync
LEAST = {"seed": 0, "steps": 1, "prompts": 1, "group": 2, "held_out": 2, "probe": 0, "warmup": 0}


@dataclass(frozen=True)
class RunConfig:
    """One real-model run.

    Args:
        model: folder or hub name; "small" is the small Qwen3 that `model.build` makes.
        task, seed, steps: what is learnt, from which random streams, for how many optimiser updates.
        prompts, group: prompts a batch, responses a prompt.
        learning_rate, warmup, betas, max_grad_norm: AdamW with a linear warm-up over `warmup` updates.
        correction, resync: presets by name, or tables that change a preset (sandbox.config).
        denominator: of the loss (losses.DENOMINATORS).
        probe: responses drawn afresh at every sync, on which the lag's ESS is measured before each update; 0 is off.
        held_out: problems on which the exact pass rate is computed before each update.
        engine: how vLLM runs.
    """

    model: str = "small"
    task: str = "sort8"
    seed: int = 0
    steps: int = 50
    prompts: int = 32
    group: int = 8
    learning_rate: float = 1e-4
    warmup: int = 0
    betas: tuple[float, float] = (0.9, 0.95)
    max_grad_norm: float = 1.0
    correction: Correction = CORRECTIONS["none"]
    resync: Resync = RESYNCS["never"]
    denominator: str = "fixed"
    probe: int = 1024
    held_out: int = 512
    engine: EngineConfig = field(default_factory=EngineConfig)

    def __post_init__(self) -> None:
        for name, least in LEAST.items():
            if getattr(self, name) < least:
                raise BadInput(f"{name} is {getattr(self, name)}, expected at least {least}")
        if not 0 < self.learning_rate <= 1:
            raise BadInput(f"learning_rate is {self.learning_rate}, expected a number above 0 and at most 1")
        if not self.max_grad_norm > 0:
            raise BadInput(f"max_grad_norm is {self.max_grad_norm}, expected a positive number; inf is off")
        if not all(0 <= beta < 1 for beta in self.betas):
            raise BadInput(f"betas is {list(self.betas)}, expected two numbers from 0 to below 1")
        if self.denominator not in losses.DENOMINATORS:
            raise BadInput(f"denominator is {self.denominator!r}, expected one of {', '.join(losses.DENOMINATORS)}")


@dataclass(frozen=True)
class Learner:
    """What an optimiser update changes; `state` and `restore` copy it, so that runs can start from one point."""

    model: nn.Module
    tokenizer: Any
    optimizer: torch.optim.Optimizer

    def state(self) -> dict[str, Any]:
        return {"model": policy.snapshot(self.model), "optimizer": deepcopy(self.optimizer.state_dict())}

    def restore(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(deepcopy(state["optimizer"]))


@dataclass(frozen=True)
class Synced:
    """The sampler since its last sync: its weights, their version, and the probe it drew."""

    weights: dict[str, Tensor]
    version: int
    max_difference: float
    probe: Rollout | None
    probe_mu: Tensor | None


def learner(folder: str | Path, config: RunConfig) -> Learner:
    """The trainer's float32 model and its AdamW, fresh."""
    model, tokenizer = policy.load(folder)
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.learning_rate, betas=config.betas, weight_decay=0.0)
    return Learner(model, tokenizer, optimizer)


def train(
    config: RunConfig, llm: Any, learner: Learner, folder: Path, progress: Callable[[dict], None] = lambda row: None
) -> pl.DataFrame:
    """Run `config.steps` updates and record them in `folder` (made here, never reused).

    Args:
        llm: a vLLM engine of the same model (`sampler.start`); it is synced first.
        learner: updated in place.
        progress: called with every row of the steps table.
    Returns:
        steps: one row an update, measured before it but for `gradient_norm`, `synced` and the seconds, and one after
        the last.
    """
    task = tasks.get(config.task)
    with results.recorded(folder, configs.resolved(config)) as outcome:
        held_out = task.sample(np.random.default_rng([0, 1]), config.held_out, held_out=True)
        prompt_rng = np.random.default_rng([config.seed, 0])
        at_sync = _sync(config, llm, learner, version=0)
        rows: list[dict] = []
        for step in range(config.steps):
            clock = time.perf_counter()
            problems = task.sample(prompt_rng, config.prompts, held_out=False)
            rollout = _draw(config, llm, learner, problems, config.group, seed=(1, step), at_sync=at_sync)
            generated = time.perf_counter()
            rewards = np.array(
                [
                    _reward(learner, problems[i], ids)
                    for i, ids in zip(rollout.prompt_index, rollout.response_ids, strict=True)
                ]
            )
            batch = evaluate(
                learner,
                rollout,
                step,
                at_sync.weights,
                normalised(rewards, rollout.prompt_index),
                config.correction.centres,
            )
            corrected = config.correction(batch)
            loss = losses.reinforce(batch, corrected, config.denominator)
            row = {"step": step, "loss": float(loss.detach())} | _measure(batch, rollout, rewards)
            row |= _state(learner, at_sync, held_out, step)
            _record(folder, step, batch, rollout, rewards)
            updating = time.perf_counter()
            row["gradient_norm"] = _update(config, learner, loss, step)
            row["synced"] = config.resync(step + 1 - at_sync.version, row["batch_ess"], row["batch_ess_se"])
            row |= {"seconds_sampling": generated - clock, "seconds_update": time.perf_counter() - updating}
            if row["synced"]:
                at_sync = _sync(config, llm, learner, version=step + 1)
            row |= {"seconds": time.perf_counter() - clock}
            rows.append(row)
            results.write_table(folder / "steps.parquet", pl.DataFrame(rows))
            progress(row)
        # the state after the last update: what the probe and the held-out problems say of it
        last = {"step": config.steps, "synced": False} | _state(learner, at_sync, held_out, config.steps)
        steps = pl.DataFrame([*rows, last], infer_schema_length=None)
        results.write_table(folder / "steps.parquet", steps)
        outcome["syncs"] = sum(row["synced"] for row in rows)
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
    sync_weights: dict[str, Tensor],
    advantage: np.ndarray,
    centre: bool = False,
) -> Batch:
    """The Batch of a rollout: pi at the live weights, with gradient, and mu at the sampler's from their snapshot."""
    ids, attention = pad(rollout, learner.tokenizer.pad_token_id)
    pi = policy.log_probs(learner.model, ids, attention)
    mu = policy.log_probs(learner.model, ids, attention, weights=sync_weights)
    return to_batch(rollout, ids, advantage, pi, version, sync_all=mu, centre=centre)


@torch.no_grad()
def probe_lag(learner: Learner, at_sync: Synced, version: int) -> dict[str, float]:
    """On the probe: sequence ESS of the raw lag ratio r, its standard error, Var[log r], and k3 of KL(q || pi)."""
    if at_sync.probe is None:
        return {}
    rollout = at_sync.probe
    ids, attention = pad(rollout, learner.tokenizer.pad_token_id)
    pi = policy.log_probs(learner.model, ids, attention)
    batch = to_batch(rollout, ids, np.zeros(len(ids)), pi, version, sync_all=at_sync.probe_mu)
    log_weight = diagnostics.sequence_log_weight(batch, "lag").double().cpu().numpy()
    return {
        "probe_ess": float(diagnostics.ess(log_weight)),
        "probe_ess_se": diagnostics.ess_standard_error(log_weight, rollout.prompt_index),
        "probe_var_log_ratio": float(log_weight.var()),
        "probe_token_kl": diagnostics.kl_sampler_train(batch)["k3"],
    }


def _sync(config: RunConfig, llm: Any, learner: Learner, version: int) -> Synced:
    problems = tasks.get(config.task).sample(np.random.default_rng([0, 2]), max(config.probe, VERIFIED), held_out=False)
    sync.push(llm, learner.model)
    prompts = [learner.tokenizer.encode(p.prompt) for p in problems[:VERIFIED]]
    verification = sync.verify(llm, learner.model, prompts)
    weights = policy.snapshot(learner.model)
    synced = Synced(weights, version, verification.max_difference, None, None)
    if config.probe == 0:
        return synced
    probe = _draw(config, llm, learner, problems[: config.probe], 1, seed=(2, version), at_sync=synced)
    ids, attention = pad(probe, learner.tokenizer.pad_token_id)
    mu = policy.log_probs(learner.model, ids, attention, weights=weights)
    return replace(synced, probe=probe, probe_mu=mu)


def _draw(
    config: RunConfig, llm: Any, learner: Learner, problems, n: int, seed: tuple[int, int], at_sync: Synced
) -> Rollout:
    encode = learner.tokenizer.encode
    longest = 1 + max(len(encode(p.answer)) for p in problems)
    return sampler.generate(
        llm,
        [encode(p.prompt) for p in problems],
        n,
        max_new_tokens=longest,
        seed=int(np.random.SeedSequence([config.seed, *seed]).generate_state(1)[0]),
        whole_vocabulary=config.correction.centres and n > 1,
        version=at_sync.version,
    )


def _reward(learner: Learner, problem: tasks.Problem, response_ids: list[int]) -> float:
    return tasks.reward(response_ids, learner.tokenizer.encode(problem.answer), learner.tokenizer.eos_token_id)


def _state(learner: Learner, at_sync: Synced, held_out: list[tasks.Problem], version: int) -> dict:
    return {
        "version_train": version,
        "version_rollout": at_sync.version,
        "steps_since_sync": version - at_sync.version,
        "sync_max_difference": at_sync.max_difference,
        "pass_probability": policy.pass_probability(learner.model, held_out, learner.tokenizer).tolist(),
        **probe_lag(learner, at_sync, version),
    }


def _measure(batch: Batch, rollout: Rollout, rewards: np.ndarray) -> dict:
    log_weight = diagnostics.sequence_log_weight(batch, "lag").double().cpu().numpy()
    split = diagnostics.decompose(batch)
    return {
        "reward": float(rewards.mean()),
        "batch_ess": float(diagnostics.ess(log_weight)),
        "batch_ess_se": diagnostics.ess_standard_error(log_weight, rollout.prompt_index),
        "discrepancy": split.discrepancy,
        "lag": split.lag,
        "total": split.total,
        "cross_term": split.cross_term,
        **{f"kl_sampler_train_{name}": value for name, value in diagnostics.kl_sampler_train(batch).items()},
    }


def _update(config: RunConfig, learner: Learner, loss: Tensor, step: int) -> float:
    if not torch.isfinite(loss):
        raise BadInput(f"loss is {float(loss.detach())} at step {step}; the steps before it are in the run folder")
    for group in learner.optimizer.param_groups:
        group["lr"] = config.learning_rate * min(1.0, (step + 1) / max(config.warmup, 1))
    learner.optimizer.zero_grad()
    loss.backward()
    norm = nn.utils.clip_grad_norm_(learner.model.parameters(), config.max_grad_norm)
    learner.optimizer.step()
    return float(norm)


def _record(folder: Path, step: int, batch: Batch, rollout: Rollout, rewards: np.ndarray) -> None:
    """The canonical rollout table: one response a row."""
    lengths = [len(ids) for ids in rollout.response_ids]

    def ragged(values: Tensor) -> list[list]:
        return [row[:n] for row, n in zip(values.detach().tolist(), lengths, strict=True)]

    table = pl.DataFrame(
        {
            "step": step,
            "prompt_id": rollout.prompt_index,
            "sample_id": np.arange(len(lengths)),
            "mask": ragged(batch.mask),
            "logp_rollout": ragged(batch.logp_rollout),
            "logp_sync": ragged(batch.need("logp_sync")),
            "logp_train": ragged(batch.logp_train),
            "version_rollout": rollout.version,
            "version_train": batch.version_train,
            "reward": rewards,
            "advantage": batch.advantage[:, 0].tolist(),
            "prompt_token_ids": rollout.prompt_ids,
            "token_ids": rollout.response_ids,
            "temperature": 1.0,
        }
    )
    results.write_table(folder / "rollouts" / f"step-{step:06d}.parquet", table)
