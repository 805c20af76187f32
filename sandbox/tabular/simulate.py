"""Monte Carlo training on a tabular problem, many runs at once: init -> State; step -> (State, Info); run -> Result.

One step: every run draws N responses from its sampler q, weighs them by the correction, updates the trainer's logits by
    step_size * (1/N) sum over responses of sum_t weight_t A (e_{a_t} - c(.|s_t)),   less `penalty`'s part,
and asks the resync rule, with the raw sequence lag ESS of that batch, whether the sampler now loads the trainer's
weights. A is R minus the batch mean ("centred"), or that over the batch's standard deviation + 1e-6 ("normalised").
Run i draws from the i-th generator spawned from the seed, so its result does not depend on the other runs beside it.
Return, ESS and KL are read by the exact recursions, not from the batch, but for `batch_ess`.
"""

from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import polars as pl

from sandbox.arrays import log_softmax
from sandbox.batch import Batch
from sandbox.corrections import CORRECTIONS, RESYNCS, Correction, Resync
from sandbox.errors import BadInput, positive
from sandbox.metrics import estimators
from sandbox.tabular import exact, kernels
from sandbox.tabular.policy import ConstantOffset, GivenOffset, Policies, policies
from sandbox.tabular.problems import Problem

TOGETHER = 32  # runs that share numpy's calls: more and their tables leave the cache, fewer and the calls weigh


@dataclass(frozen=True)
class SimConfig:
    """How to train; what to train on (problem and start) is given beside it.

    Args:
        correction: any member of `corrections.CORRECTIONS`.
        resync: any rule of `corrections.resync`.
        discrepancy: what the sampler's engine adds; of a `ConstantOffset` every run draws its own.
        step_size: of plain gradient ascent on the logits.
        batch_size: responses per update, N >= 2.
        steps: updates.
        advantage: "centred" or "normalised".
        penalty: beta of -beta KL(pi || uniform), whole sequences: its exact gradient at the trainer's current weights
            is part of every update, so that there is one optimum.
        seed: root of the runs' generators.
        readings: read return, ESS and KL by the exact recursions after every step; without, they are nan and a step
            costs a fraction.
    """

    correction: Correction = CORRECTIONS["none"]
    resync: Resync = RESYNCS["never"]
    discrepancy: ConstantOffset | GivenOffset = ConstantOffset()  # noqa: RUF009, frozen
    step_size: float = 1.0
    batch_size: int = 256
    steps: int = 100
    advantage: exact.Advantage = "normalised"
    penalty: float = 0.0
    seed: int = 0
    readings: bool = True

    def __post_init__(self) -> None:
        if self.batch_size < 2:
            raise BadInput(f"batch_size is {self.batch_size}, expected at least 2: the advantage needs a batch mean")
        if self.steps < 1:
            raise BadInput(f"steps is {self.steps}, expected at least 1")
        positive("step_size", self.step_size)
        if self.seed < 0:
            raise BadInput(f"seed is {self.seed}, expected 0 or more")
        if not 0 <= self.penalty < np.inf:
            raise BadInput(f"penalty is {self.penalty}, expected a finite number >= 0")
        if self.advantage not in exact.ADVANTAGES:
            raise BadInput(f"advantage is {self.advantage!r}, expected one of {', '.join(exact.ADVANTAGES)}")


class State(NamedTuple):
    """What training carries from step to step."""

    trainer: np.ndarray  # logits, (R, S, V)
    sampler: np.ndarray  # logits of the last sync, (R, S, V)
    log_offset: np.ndarray  # of the sampler's engine, (R, S, V)
    since_sync: np.ndarray  # updates since the last sync, int (R,)
    syncs: np.ndarray  # int (R,)
    policies: Policies  # of trainer, sampler and log_offset, (R, S, V)


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
    """Trainer and sampler of every run at `logits` (S, V), each run with its own draw of the discrepancy.

    Raises BadInput for logits of another shape.
    """
    if np.shape(logits) != problem.shape:
        raise BadInput(f"logits has shape {np.shape(logits)}, expected {problem.shape}")
    start = np.repeat(np.asarray(logits, dtype=float)[None], len(rngs), axis=0)
    log_offset = np.stack([cfg.discrepancy(rng, problem.shape) for rng in rngs])
    zeros = np.zeros(len(rngs), dtype=int)
    return State(start, start, log_offset, zeros, zeros, policies(start, start, log_offset))


def step(rngs: Sequence[np.random.Generator], problem: Problem, state: State, cfg: SimConfig) -> tuple[State, Info]:
    """One update of every run; `state` stays as it is."""
    return _advance(rngs, problem, *_own(state), cfg, _scratch(problem, len(rngs), cfg))


def _own(state: State) -> tuple[State, np.ndarray]:
    """A copy that `_advance` may change, and the tables that trainer, pi and mu are views of. (R, S, 4, V)"""
    _, sync, rollout = state.policies
    tables = kernels.tables(state.trainer, *state.policies)
    train, kept, trainer = (tables[..., which, :] for which in (kernels.TRAIN, kernels.SYNC, kernels.LOGITS))
    now = Policies(train, kept, kept if rollout is sync else rollout.copy())
    return state._replace(trainer=trainer, sampler=state.sampler.copy(), policies=now), tables


def _scratch(problem: Problem, runs: int, cfg: SimConfig) -> kernels.Scratch:
    return kernels.scratch(runs, cfg.batch_size, problem.horizon, *problem.shape)


def _advance(
    rngs: Sequence[np.random.Generator],
    problem: Problem,
    state: State,
    tables: np.ndarray,
    cfg: SimConfig,
    room: kernels.Scratch,
) -> tuple[State, Info]:
    """`step`, changing the arrays of `state` in place: only visited states move, only synced runs load."""
    now = state.policies
    for rng, uniform in zip(rngs, room.uniform, strict=True):
        rng.random(out=uniform)
    machine = problem.transition, problem.initial, problem.reward
    count = kernels.sample(tables, *machine, cfg.advantage == "normalised", room)
    # Every response is a group of its own: there is one prompt.
    batch_ess, influence = estimators.ess_and_influence(room.log_weight)
    standard_error = batch_ess * np.sqrt((influence**2).sum(axis=-1)) / cfg.batch_size

    change = _change(problem, now, room, count, cfg.correction)
    pulls = [exact.kl_gradient(problem, train) for train in now.train] if cfg.penalty else []
    after, rows, table = np.empty_like(change), room.rows[:count], tables.reshape(-1, *tables.shape[2:])
    kernels.move(rows, change, cfg.step_size / cfg.batch_size, table, after)
    kernels.store(rows, log_softmax(after, axis=0), table)
    for run, pull in enumerate(pulls):
        state.trainer[run] -= cfg.step_size * cfg.penalty * pull
        now.train[run] = log_softmax(state.trainer[run])

    since_sync = state.since_sync + 1
    arguments = zip(since_sync.tolist(), batch_ess.tolist(), standard_error.tolist(), strict=True)
    synced = np.array([cfg.resync(*a) for a in arguments])
    info = _read(problem, now, cfg.readings)._replace(batch_ess=batch_ess, since_sync=since_sync, synced=synced)
    for run in np.flatnonzero(synced):
        trainer = state.sampler[run] = state.trainer[run]
        loaded = policies(trainer, trainer, state.log_offset[run])
        now.rollout[run], tables[run] = loaded.rollout, kernels.tables(trainer, *loaded)
    return state._replace(since_sync=since_sync * ~synced, syncs=state.syncs + synced), info


def update(problem: Problem, now: Policies, pairs: np.ndarray, cfg: SimConfig) -> np.ndarray:
    """Mean over the drawn responses of sum_t weight_t A (e_a - c(.|s)). (R, S, V)

    Args:
        pairs: drawn (state, token) as s V + a, -1 after the end. int (R, N, T)
    """
    states, vocabulary = problem.shape
    runs, n, horizon = pairs.shape
    room = kernels.scratch(runs, n, horizon, states, vocabulary)
    returns = _gather(problem.reward[None], pairs).sum(axis=-1)
    for run, gain in zip(returns, room.gain, strict=True):
        kernels.advantages(run, cfg.advantage == "normalised", gain[:, 0])
    drawn = pairs >= 0
    rows, at = np.unique((np.arange(runs)[:, None, None] * states + pairs // vocabulary)[drawn], return_inverse=True)
    count = len(rows)
    room.rows[:count], room.mass[:], room.slot[:] = rows, 0.0, -1
    room.slot[drawn] = pairs[drawn] % vocabulary * len(room.rows) + at
    for slot, gain in zip(room.slot, room.gain, strict=True):
        kernels.add_up(slot, gain, room.mass.reshape(-1))
    for of, into in ((now.train, room.train), (now.sync, room.sync)):
        into[:, :count] = of.reshape(-1, vocabulary)[rows].T
    total = np.zeros(now.train.shape)
    total.reshape(-1, vocabulary)[rows] = _change(problem, now, room, count, cfg.correction).T / n
    return total


def _change(problem: Problem, now: Policies, room: kernels.Scratch, count: int, correction: Correction) -> np.ndarray:
    """The batch's sum of weight A (e_a - c(.|s)) at each visited row, tokens first. (V, M)

    Args:
        room: of the batch, with its first `count` rows.
    """
    mass, train, sync = room.mass[:, :count], room.train[:, :count], room.sync[:, :count]
    if not correction.factors:
        mass = _mass_from_batch(problem, now, room, correction)[:, :count]
    if not correction.factors or correction == CORRECTIONS["none"]:
        return mass - np.exp(train) * mass.sum(axis=0)
    rollout = sync
    if now.rollout is not now.sync:
        rollout = np.ascontiguousarray(np.take(now.rollout.reshape(-1, problem.shape[1]), room.rows[:count], axis=0).T)
    weight, centre = exact.token_weights(Policies(train.T, sync.T, rollout.T), correction)
    mass = mass * weight.T
    return mass - centre.T * mass.sum(axis=0)


def _mass_from_batch(problem: Problem, now: Policies, room: kernels.Scratch, correction: Correction) -> np.ndarray:
    """Sum of weight times advantage at each visited (state, token), and its centring, for a correction that must see
    whole responses or their advantage: through a Batch. (V, most)"""
    vocabulary, horizon = problem.shape[1], room.slot.shape[-1]
    slot = room.slot.reshape(-1, horizon)
    mask = slot >= 0
    token, row = np.divmod(np.where(mask, slot, 0), len(room.rows))
    state = room.rows[row]
    train, sync, rollout = (p.reshape(-1)[state * vocabulary + token] for p in now)
    batch = Batch(train, rollout, mask, room.gain.reshape(-1, 1), sync)
    if correction.centres:
        train, sync, rollout = (p.reshape(-1, vocabulary)[state] for p in now)
        batch = replace(batch, logp_train_all=train, logp_sync_all=sync, logp_rollout_all=rollout)
    n = room.slot.shape[1]
    said = [correction(batch.rows(slice(i, i + n))) for i in range(0, len(mask), n)]  # a rule may mix a run's responses
    weight, keep, shift = (np.concatenate(x) if np.ndim(x[0]) else x[0] for x in zip(*said, strict=True))
    gain = np.where(keep, weight * batch.advantage, 0.0).reshape(room.slot.shape)

    def add_up(gain: np.ndarray) -> np.ndarray:
        mass = np.zeros_like(room.mass)
        for slot, own in zip(room.slot, gain, strict=True):
            kernels.add_up(slot, own, mass.reshape(-1))
        return mass

    mass = add_up(gain)
    if not isinstance(shift, int | float):
        for a in range(vocabulary):
            # c - pi sums to 0 over the tokens: taken off the mass it leaves the total as it is.
            mass[a] -= add_up(gain * shift[..., a].reshape(gain.shape)).sum(axis=0)
    return mass


def _gather(table: np.ndarray, pairs: np.ndarray) -> np.ndarray:
    """Entries of each run's (state, token) table at the drawn pairs, 0 after the end. (R or 1, S, V) -> (R, N, T)"""
    flat = table.reshape(len(table), -1)
    return np.where(pairs >= 0, flat[np.arange(len(table))[:, None, None], pairs], 0.0)


def _read(problem: Problem, now: Policies, exactly: bool) -> Info:
    """The exact fields of `Info`, nan unless `exactly`; the others are left empty."""
    empty = np.empty(0)
    if not exactly:
        unread = np.full(len(now.train), np.nan)
        return Info(unread, unread, unread, empty, unread, empty, empty)
    on_sampler = np.stack(np.broadcast_arrays(problem.reward, now.rollout - now.train, 1.0))
    returns_sampler, kl, length = exact.expectation(problem, now.rollout, on_sampler)
    returns = exact.expectation(problem, now.train, problem.reward)
    return Info(returns, returns_sampler, exact.ess(problem, now.train, now.sync), empty, kl / length, empty, empty)


class Result(NamedTuple):
    """table: one row per run and step: run, step, since_sync, return, return_sampler, ess, batch_ess, token_kl, syncs.
    state: at the end of all steps, its first axis in the order of the runs."""

    table: pl.DataFrame
    state: State


def run(
    problem: Problem, logits: np.ndarray, cfg: SimConfig, runs: Sequence[int] = range(1), threads: int = 1
) -> Result:
    """Train the named runs from `logits` (S, V), many at once. `syncs` counts those done, the row's own included.

    Args:
        threads: that share the runs; results do not depend on it.
    Raises BadInput: no runs, a negative run, or threads < 1.
    """
    positive("threads", threads)
    if not len(runs) or min(runs) < 0:
        raise BadInput(f"runs is {list(runs)}, expected at least one number >= 0")
    groups = [runs[i : i + TOGETHER] for i in range(0, len(runs), TOGETHER)]
    with ThreadPoolExecutor(threads) as pool:
        done = list(pool.map(lambda group: _run(problem, logits, cfg, group), groups))
    tables, states = zip(*done, strict=True)
    now = Policies(*(np.concatenate(p) for p in zip(*(s.policies for s in states), strict=True)))
    rest = (np.concatenate([getattr(s, field) for s in states]) for field in State._fields[:-1])
    return Result(pl.concat(tables), State(*rest, policies=now))


def _run(problem: Problem, logits: np.ndarray, cfg: SimConfig, runs: Sequence[int]) -> tuple[pl.DataFrame, State]:
    rngs = generators(cfg.seed, runs)
    (state, tables), room = _own(init(rngs, problem, logits, cfg)), _scratch(problem, len(rngs), cfg)
    infos, syncs = [], []
    for _ in range(cfg.steps):
        state, info = _advance(rngs, problem, state, tables, cfg, room)
        infos.append(info)
        syncs.append(state.syncs)
    columns = {
        "run": np.tile(np.array(runs), cfg.steps),
        "step": np.repeat(np.arange(1, cfg.steps + 1), len(rngs)),
        "since_sync": np.concatenate([info.since_sync for info in infos]),
        "return": np.concatenate([info.returns for info in infos]),
        "return_sampler": np.concatenate([info.returns_sampler for info in infos]),
        "ess": np.concatenate([info.ess for info in infos]),
        "batch_ess": np.concatenate([info.batch_ess for info in infos]),
        "token_kl": np.concatenate([info.token_kl for info in infos]),
        "syncs": np.concatenate(syncs),
    }
    return pl.DataFrame(columns).sort("run", "step", maintain_order=True), state


def ess_steps(table: pl.DataFrame, threshold: float = 0.5) -> pl.DataFrame:
    """First update since the sync at which the population ESS is below `threshold`, inf where it never is.

    Args:
        table: of `run`, or of `levels.mean_field` with a column `run`.
    Returns: columns run, ess_step
    """
    below = pl.col("since_sync").filter(pl.col("ess") < threshold).first().cast(pl.Float64)
    return table.group_by("run", maintain_order=True).agg(ess_step=below.fill_null(np.inf))
