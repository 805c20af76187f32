"""Monte Carlo training on a tabular problem, many runs at once: init -> State; step -> (State, Info); run -> Result.

One step: every run draws N responses from its sampler q, weighs them by the correction, updates the trainer's logits by
    step_size * (1/N) sum over responses of sum_t weight_t A (e_{a_t} - c(.|s_t)),
and asks the resync rule, with the raw sequence lag ESS of that batch, whether the sampler now loads the trainer's
weights. A is R minus the batch mean ("centred"), or that over the batch's standard deviation + 1e-6 ("normalised").
Run i draws from the i-th generator spawned from the seed, so its result does not depend on the other runs beside it.
Return, ESS and KL are read by the exact recursions, not from the batch, but for `batch_ess`.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import polars as pl

from sandbox import diagnostics, exact
from sandbox.batch import Batch
from sandbox.corrections import CORRECTIONS, Correction
from sandbox.errors import BadInput
from sandbox.mismatch import RESYNCS, ConstantOffset, Resync
from sandbox.policy import Policies, draw, policies
from sandbox.problems import Problem


@dataclass(frozen=True)
class SimConfig:
    """How to train; what to train on (problem and start) is given beside it.

    Args:
        correction: any member of `corrections.CORRECTIONS`.
        resync: any rule of `mismatch.py`.
        discrepancy: what the sampler's engine adds; every run draws its own.
        step_size: of plain gradient ascent on the logits.
        batch_size: responses per update, N >= 2.
        steps: updates.
        advantage: "centred" or "normalised".
        seed: root of the runs' generators.
    """

    correction: Correction = CORRECTIONS["none"]
    resync: Resync = RESYNCS["never"]
    discrepancy: ConstantOffset = ConstantOffset()  # noqa: RUF009, frozen
    step_size: float = 1.0
    batch_size: int = 256
    steps: int = 100
    advantage: exact.Advantage = "normalised"
    seed: int = 0

    def __post_init__(self) -> None:
        if self.batch_size < 2:
            raise BadInput(f"batch_size is {self.batch_size}, expected at least 2: the advantage needs a batch mean")
        if self.steps < 1:
            raise BadInput(f"steps is {self.steps}, expected at least 1")
        if self.advantage not in exact.ADVANTAGES:
            raise BadInput(f"advantage is {self.advantage!r}, expected one of {', '.join(exact.ADVANTAGES)}")


class State(NamedTuple):
    """What training carries from step to step."""

    trainer: np.ndarray  # logits, (R, S, V)
    sampler: np.ndarray  # logits of the last sync, (R, S, V)
    log_offset: np.ndarray  # of the sampler's engine, (R, S, V)
    since_sync: np.ndarray  # updates since the last sync, int (R,)
    syncs: np.ndarray  # int (R,)
    policies: Policies  # of the three fields above it, (R, S, V)


class Info(NamedTuple):
    """What one step tells, (R,) each; after the update and before any sync, but for `batch_ess`.

    returns, returns_sampler: exact E_pi[R] and E_q[R].
    ess: population sequence lag ESS, exp(-D2(pi || mu)).
    batch_ess: raw sequence lag ESS of the drawn batch, before the update: what the resync rule saw.
    token_kl: KL(q || pi) per token on the sampler's prefixes, nats.
    since_sync: updates since the sync, this one included.
    synced: whether the sampler then loaded the trainer's weights.
    """

    returns: np.ndarray
    returns_sampler: np.ndarray
    ess: np.ndarray
    batch_ess: np.ndarray
    token_kl: np.ndarray
    since_sync: np.ndarray
    synced: np.ndarray


def generators(seed: int, runs: Iterable[int]) -> list[np.random.Generator]:
    """The generators of the named runs: run i has the i-th child of SeedSequence(seed)."""
    return [np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(run,))) for run in runs]


def init(rngs: Sequence[np.random.Generator], problem: Problem, logits: np.ndarray, cfg: SimConfig) -> State:
    """Trainer and sampler of every run at `logits` (S, V), each run with its own draw of the discrepancy."""
    if np.shape(logits) != problem.shape:
        raise BadInput(f"logits has shape {np.shape(logits)}, expected {problem.shape}")
    start = np.repeat(np.asarray(logits, dtype=float)[None], len(rngs), axis=0)
    log_offset = np.stack([cfg.discrepancy(rng, problem.shape) for rng in rngs])
    zeros = np.zeros(len(rngs), dtype=int)
    return State(start, start, log_offset, zeros, zeros, policies(start, start, log_offset))


def step(rngs: Sequence[np.random.Generator], problem: Problem, state: State, cfg: SimConfig) -> tuple[State, Info]:
    """One update of every run."""
    uniform = np.stack([rng.random((cfg.batch_size, problem.horizon)) for rng in rngs])
    pairs = draw(problem, state.policies.rollout, uniform)
    log_weight = _gather(state.policies.train - state.policies.sync, pairs).sum(axis=-1)
    batch_ess = diagnostics.ess(log_weight)
    # Every response is a group of its own: there is one prompt.
    influence = diagnostics.ess_influence(log_weight)
    standard_error = batch_ess * np.sqrt((influence**2).sum(axis=-1)) / cfg.batch_size

    trainer = state.trainer + cfg.step_size * update(problem, state.policies, pairs, cfg)
    since_sync = state.since_sync + 1
    now = policies(trainer, state.sampler, state.log_offset)
    arguments = zip(since_sync.tolist(), batch_ess.tolist(), standard_error.tolist(), strict=True)
    synced = np.array([cfg.resync(*a) for a in arguments])
    info = _read(problem, now)._replace(batch_ess=batch_ess, since_sync=since_sync, synced=synced)
    if synced.any():
        loaded = np.where(synced[:, None, None], trainer, state.sampler)
        now = policies(trainer, loaded, state.log_offset)
        return State(trainer, loaded, state.log_offset, since_sync * ~synced, state.syncs + synced, now), info
    return State(trainer, state.sampler, state.log_offset, since_sync, state.syncs, now), info


def update(problem: Problem, now: Policies, pairs: np.ndarray, cfg: SimConfig) -> np.ndarray:
    """Mean over the drawn responses of sum_t weight A (e_a - c(.|s)). (R, S, V)

    Args:
        pairs: drawn (state, token) as s V + a, -1 after the end. int (R, N, T)
    """
    advantage = _advantage(_gather(problem.reward[None], pairs).sum(axis=-1), cfg.advantage)[..., None]
    if cfg.correction.factors:
        weight, centre = exact.token_weights(now, cfg.correction)
        mass = _scatter(_gather(weight, pairs) * advantage, pairs, problem)
        total = mass - centre * mass.sum(axis=-1, keepdims=True)
    else:
        total = _update_from_batch(problem, now, pairs, advantage, cfg.correction)
    return total / cfg.batch_size


def _update_from_batch(
    problem: Problem, now: Policies, pairs: np.ndarray, advantage: np.ndarray, correction: Correction
) -> np.ndarray:
    """The same sum for a correction that must see whole responses or their advantage: through a Batch. (R, S, V)"""
    runs, n, horizon = pairs.shape
    train, sync, rollout = (_gather(p, pairs).reshape(-1, horizon) for p in now)
    batch = Batch(train, rollout, (pairs >= 0).reshape(-1, horizon), advantage.reshape(-1, 1), sync)
    if correction.centres:
        index, row = np.arange(runs)[:, None, None], pairs // problem.shape[1]
        train, sync, rollout = (p[index, row].reshape(runs * n, horizon, -1) for p in now)
        batch = replace(batch, logp_train_all=train, logp_sync_all=sync, logp_rollout_all=rollout)
    weight, keep, centre = correction(batch)
    gain = np.where(keep, weight * advantage.reshape(-1, 1), 0.0).reshape(pairs.shape)
    mass = _scatter(gain, pairs, problem)
    total = mass - np.exp(now.train) * mass.sum(axis=-1, keepdims=True)
    if isinstance(centre, int | float):
        return total
    tokens = range(problem.shape[1])
    first = pairs - pairs % problem.shape[1]  # token 0 of the same state
    shifts = [
        _scatter(gain * centre[..., a].reshape(pairs.shape), np.where(pairs >= 0, first + a, -1), problem)
        for a in tokens
    ]
    return total - np.sum(shifts, axis=0)


def _advantage(returns: np.ndarray, kind: exact.Advantage) -> np.ndarray:
    """Returns minus their batch mean, over the batch's standard deviation + 1e-6 where normalised. (R, N)"""
    centred = returns - returns.mean(axis=-1, keepdims=True)
    if kind == "centred":
        return centred
    return centred / (returns.std(axis=-1, keepdims=True) + exact.ADVANTAGE_EPS)


def _gather(table: np.ndarray, pairs: np.ndarray) -> np.ndarray:
    """Entries of each run's (state, token) table at the drawn pairs, 0 after the end. (R or 1, S, V) -> (R, N, T)"""
    flat = table.reshape(len(table), -1)
    return np.where(pairs >= 0, flat[np.arange(len(table))[:, None, None], pairs], 0.0)


def _scatter(values: np.ndarray, pairs: np.ndarray, problem: Problem) -> np.ndarray:
    """Sum of the drawn tokens' values at each (state, token) of their run. (R, N, T) -> (R, S, V)"""
    runs, size = len(pairs), problem.reward.size
    drawn = pairs >= 0
    where = (pairs + size * np.arange(runs)[:, None, None])[drawn]
    return np.bincount(where, values[drawn], minlength=runs * size).reshape(runs, *problem.shape)


def _read(problem: Problem, now: Policies) -> Info:
    """The exact fields of `Info`; the others are left empty."""
    on_sampler = np.stack(np.broadcast_arrays(problem.reward, now.rollout - now.train, 1.0))
    returns_sampler, kl, length = exact.expectation(problem, now.rollout, on_sampler)
    returns = exact.expectation(problem, now.train, problem.reward)
    empty = np.empty(0)
    return Info(returns, returns_sampler, exact.ess(problem, now.train, now.sync), empty, kl / length, empty, empty)


class Result(NamedTuple):
    """table: one row per run and step: run, step, since_sync, return, return_sampler, ess, batch_ess, token_kl, syncs.
    state: at the end of all steps, its first axis in the order of the runs."""

    table: pl.DataFrame
    state: State


def run(problem: Problem, logits: np.ndarray, cfg: SimConfig, runs: Sequence[int] = range(1)) -> Result:
    """Train the named runs from `logits` (S, V), all at once. `syncs` counts those done, the row's own included."""
    rngs = generators(cfg.seed, runs)
    state = init(rngs, problem, logits, cfg)
    frames = []
    for k in range(1, cfg.steps + 1):
        state, info = step(rngs, problem, state, cfg)
        frames.append(
            pl.DataFrame(
                {
                    "run": list(runs),
                    "step": [k] * len(rngs),
                    "since_sync": info.since_sync,
                    "return": info.returns,
                    "return_sampler": info.returns_sampler,
                    "ess": info.ess,
                    "batch_ess": info.batch_ess,
                    "token_kl": info.token_kl,
                    "syncs": state.syncs,
                }
            )
        )
    return Result(pl.concat(frames).sort("run", "step", maintain_order=True), state)


def ess_steps(table: pl.DataFrame, threshold: float = 0.5) -> pl.DataFrame:
    """First update since the sync at which the population ESS is below `threshold`, inf where it never is.

    Args:
        table: of `run`, or of `theory.mean_field` with a column `run`.
    Returns: columns run, ess_step
    """
    below = pl.col("since_sync").filter(pl.col("ess") < threshold).first().cast(pl.Float64)
    return table.group_by("run", maintain_order=True).agg(ess_step=below.fill_null(np.inf))
