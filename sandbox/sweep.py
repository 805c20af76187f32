"""`mismatch sweep`: a grid of simulated trainings over local cores or a cluster, resumable, the same bits on each.

A cell is one problem, step size, correction, discrepancy and resync rule; a task is some runs of one cell, trained side
by side. Run i has the i-th generator of the seed in every cell, so results depend on nothing but the config: not on
the backend, the workers, the order, or how runs are shared out. Every finished task is a Parquet part in the run
folder; what a kill loses is the tasks in flight, and resuming does the missing ones.

Each run is held against on-policy training (exact sampler, synced after every update) of the same problem, step size
and generator: its failure_step, and KL(on-policy || run) of whole sequences at the end, in units of the KL between two
on-policy runs of different generators.
"""

import hashlib
import itertools
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import BrokenExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, NamedTuple

import joblib
import numpy as np
import polars as pl

from sandbox import collapse, config, exact, predict, presets, problem_json, results, simulate
from sandbox.corrections import CORRECTIONS, Correction
from sandbox.errors import BadInput
from sandbox.mismatch import RESYNCS, ConstantOffset, EveryK, Resync
from sandbox.problems import Case
from sandbox.simulate import SimConfig

Backend = Literal["loky", "dask", "ray"]
MOST_CELLS = 10**6
ONE_BY_ONE: dict[str, Any] = {"batch_size": 1}  # a task is long enough; joblib would send several at once


@dataclass(frozen=True)
class SweepConfig:
    """A grid; a field in the plural is an axis of it.

    Args:
        problems: presets or PROBLEM.json files.
        corrections, resyncs: presets or rules.
        discrepancies: standard deviations of the engine's constant offset, nats; each run draws its own.
        step_sizes: of plain gradient ascent on the logits.
        runs: of each cell, >= 2; on-policy training has twice as many.
        steps: updates of each run.
        start: weights at the start, the problem's own ("sampler_logits") or 0 ("uniform").
        batch_size, advantage, penalty, seed: of `simulate.SimConfig`.
        threshold: sequence ESS below which it has collapsed.
        together: runs of a task.
    """

    problems: tuple[str, ...]
    corrections: tuple[Correction, ...] = (CORRECTIONS["none"],)
    resyncs: tuple[Resync, ...] = (RESYNCS["never"],)
    discrepancies: tuple[float, ...] = (0.0,)
    step_sizes: tuple[float, ...] = (1.0,)
    runs: int = 8
    steps: int = 60
    start: predict.Start = "sampler_logits"
    batch_size: int = 256
    advantage: exact.Advantage = "normalised"
    penalty: float = 0.0
    seed: int = 0
    threshold: float = 0.5
    together: int = 32

    def __post_init__(self) -> None:
        for name in ("problems", "corrections", "resyncs", "discrepancies", "step_sizes"):
            values = getattr(self, name)
            if not values:
                raise BadInput(f"{name} is empty, expected at least one")
            if any(value in values[:place] for place, value in enumerate(values)):
                raise BadInput(f"{name} has a value twice")
        for name, least in (("runs", 2), ("together", 1)):
            if getattr(self, name) < least:
                raise BadInput(f"{name} is {getattr(self, name)}, expected at least {least}")
        for step_size in self.step_sizes:
            if not 0 < step_size < math.inf:
                raise BadInput(f"step_sizes has {step_size}, expected finite numbers above 0")
        collapse.var_threshold(self.threshold)
        size = math.prod(len(axis) for axis in axes(self))
        if size > MOST_CELLS:
            raise BadInput(f"the grid has {size} cells, expected at most {MOST_CELLS}")
        for cell in cells(self):
            cell.training(self)  # refuses what SimConfig would


class Cell(NamedTuple):
    """One point of the grid, numbered in order of the config's axes."""

    number: int
    problem: str
    step_size: float
    correction: Correction
    discrepancy: float
    resync: Resync

    def training(self, sweep: SweepConfig) -> SimConfig:
        return SimConfig(
            self.correction,
            self.resync,
            ConstantOffset(self.discrepancy),
            self.step_size,
            sweep.batch_size,
            sweep.steps,
            sweep.advantage,
            sweep.penalty,
            sweep.seed,
        )


class Reference(NamedTuple):
    """On-policy training of one problem and step size.

    logp: log pi at the end of each run. (2 runs, S, V)
    returns: of each run after each update. (2 runs, steps)
    unit: mean KL between run i and run i + runs at the end, nats.
    """

    logp: np.ndarray
    returns: np.ndarray
    unit: float

    def of(self, runs: range) -> "Reference":
        """With the log-probabilities of those runs alone: what a task is sent."""
        return self._replace(logp=self.logp[runs.start : runs.stop])


def axes(sweep: SweepConfig) -> tuple[Sequence[Any], ...]:
    """In the order of a cell's fields."""
    return sweep.problems, sweep.step_sizes, sweep.corrections, sweep.discrepancies, sweep.resyncs


def cells(sweep: SweepConfig) -> Iterator[Cell]:
    """Every cell, in order."""
    yield from (Cell(number, *point) for number, point in enumerate(itertools.product(*axes(sweep))))


def tasks(sweep: SweepConfig) -> list[tuple[Cell, range]]:
    """Every task: a cell and some of its runs."""
    shares = [range(i, min(i + sweep.together, sweep.runs)) for i in range(0, sweep.runs, sweep.together)]
    return list(itertools.product(cells(sweep), shares))


def part(cell: Cell, runs: range) -> str:
    """Name of the file that a task's results go to."""
    return f"part-{cell.number:06d}-{runs.start:06d}.parquet"


def run(
    sweep: SweepConfig,
    folder: Path,
    resume: bool = False,
    workers: int = -1,
    backend: Backend = "loky",
    address: str | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> pl.DataFrame:
    """Do the tasks that `folder` lacks; the whole table, `runs.parquet`, once there is no such task.

    Args:
        folder: a new run folder; with `resume`, one that an earlier call of the same config has left.
        workers: processes; all cores at -1. A cluster has its own.
        address: of a dask or ray cluster; a local one is made without.
        progress: called with the tasks done and all tasks.
    Returns: a row a run: the cell's axes, run, ess_step, failure_step, return, return_sampler, syncs,
        kl (from on-policy, in units of the pair's), staleness (of a fixed period, else null).
    Raises:
        BadInput: another config's folder; a problem that cannot be read; a dead worker or cluster.
    """
    cases = {name: problem_json.named(name) for name in sweep.problems}
    asked = config.resolved(sweep) | {"digests": [_digest(case) for case in cases.values()]}
    every = tasks(sweep)
    with workers_of(workers, backend, address, folder):
        results.begin_run(folder, asked, resume)
        missing = [task for task in every if not (folder / "parts" / part(*task)).exists()]
        progress(len(every) - len(missing), len(every))
        wanted = sorted({(cell.problem, cell.step_size) for cell, _ in missing})
        calls = (joblib.delayed(reference)(sweep, cases[name], step_size) for name, step_size in wanted)
        found: Any = joblib.Parallel(**ONE_BY_ONE)(calls)
        against: dict[tuple[str, float], Reference] = dict(zip(wanted, found, strict=True))
        calls = (
            joblib.delayed(done)(sweep, cases[cell.problem], cell, runs, against[cell.problem, cell.step_size].of(runs))
            for cell, runs in missing
        )
        for count, (name, table) in enumerate(as_they_come(calls), 1):
            results.write_table(folder / "parts" / name, table)
            progress(len(every) - len(missing) + count, len(every))
    table = pl.concat([pl.read_parquet(folder / "parts" / part(*task)) for task in every])
    results.write_table(folder / "runs.parquet", table)
    results.finish_run(folder)
    return table


def reference(sweep: SweepConfig, case: Case, step_size: float) -> Reference:
    """On-policy training that runs of this problem and step size are held against."""
    on_policy = Cell(0, "", step_size, CORRECTIONS["none"], 0.0, EveryK(1)).training(sweep)
    runs = simulate.run(case.problem, predict.start_of(case, sweep.start), on_policy, range(2 * sweep.runs))
    logp = runs.state.policies.train
    unit = exact.kl(case.problem, logp[: sweep.runs], logp[sweep.runs :]).mean()
    return Reference(logp, runs.table["return"].to_numpy().reshape(len(logp), -1), float(unit))


def done(sweep: SweepConfig, case: Case, cell: Cell, runs: range, against: Reference) -> tuple[str, pl.DataFrame]:
    """A task's part: its name and its rows, as `run` returns them.

    Args:
        against: its `logp` of these runs alone.
    """
    trained = simulate.run(case.problem, predict.start_of(case, sweep.start), cell.training(sweep), runs)
    return part(cell, runs), _rows(sweep, case, cell, runs, against, trained)


def _rows(
    sweep: SweepConfig, case: Case, cell: Cell, runs: range, against: Reference, trained: simulate.Result
) -> pl.DataFrame:
    returns = trained.table["return"].to_numpy().reshape(len(runs), -1)
    fails = [1 + collapse.failure_step(x[:, None], [y[:, None] for y in against.returns]) for x in returns]
    last = trained.table.filter(pl.col("step") == sweep.steps)
    steps = simulate.ess_steps(trained.table, sweep.threshold)
    return steps.join(last, on="run", maintain_order="left").select(
        pl.lit(cell.number).alias("cell"),
        pl.lit(cell.problem).alias("problem"),
        pl.lit(cell.step_size).alias("step_size"),
        pl.lit(_name(cell.correction, presets.PRESETS | presets.RULES)).alias("correction"),
        pl.lit(cell.discrepancy).alias("discrepancy"),
        pl.lit(_name(cell.resync, RESYNCS)).alias("resync"),
        pl.lit(cell.resync.k if isinstance(cell.resync, EveryK) else None, pl.Int64).alias("staleness"),
        "run",
        "ess_step",
        pl.Series("failure_step", fails, pl.Float64),
        "return",
        "return_sampler",
        "syncs",
        pl.Series("kl", exact.kl(case.problem, against.logp, trained.state.policies.train) / against.unit),
    )


def one(sweep: SweepConfig) -> tuple[pl.DataFrame, dict[str, Any]]:
    """Every step of every run of the only cell, as `simulate.run` has them, and the cell's row of `summary`.

    Raises BadInput where the grid has more cells.
    """
    (cell, *others), runs = cells(sweep), range(sweep.runs)
    if others:
        raise BadInput(f"the grid has {1 + len(others)} cells, expected one: mismatch sweep does them all")
    case = problem_json.named(cell.problem)
    trained = simulate.run(case.problem, predict.start_of(case, sweep.start), cell.training(sweep), runs)
    table = _rows(sweep, case, cell, runs, reference(sweep, case, cell.step_size).of(runs), trained)
    return trained.table, summary(table).to_dicts()[0]


def summary(table: pl.DataFrame) -> pl.DataFrame:
    """A row a cell: upper medians of the two steps over its runs (inf counts as a number), means of the rest."""
    names = ["problem", "step_size", "correction", "discrepancy", "resync", "staleness"]
    middle = [pl.col(name).sort().get(pl.len() // 2) for name in ("ess_step", "failure_step")]
    means = [pl.col(name).mean() for name in ("return", "return_sampler", "syncs", "kl")]
    return table.group_by("cell", *names, maintain_order=True).agg(pl.len().alias("runs"), *middle, *means).drop("cell")


def _name(rule: Any, known: Mapping[str, Any]) -> str:
    """A preset's name, or that of the first preset of its kind and what differs from it: every(k=4)."""
    if rule in known.values():
        return next(name for name, preset in known.items() if preset == rule)
    name, base = next((name, preset) for name, preset in known.items() if type(preset) is type(rule))
    changed = {field.name: getattr(rule, field.name) for field in fields(rule)}
    return f"{name}({', '.join(f'{k}={v}' for k, v in changed.items() if v != getattr(base, k))})"


def _digest(case: Case) -> str:
    """Of all that a case holds, so that a file that changed is not resumed."""
    problem = case.problem
    arrays = problem.transition, problem.reward, case.logits, case.sampler_logits
    content = [x.tobytes() for x in arrays] + [repr((problem.shape, problem.horizon, problem.initial)).encode()]
    return hashlib.sha256(b"".join(content)).hexdigest()


@contextmanager
def workers_of(workers: int, backend: Backend, address: str | None, folder: Path) -> Iterator[None]:
    """joblib's own way to local processes, dask or ray."""
    lost: tuple[type[BaseException], ...] = (BrokenExecutor,)
    with ExitStack() as stack:
        try:
            if backend == "dask":
                from distributed import Client, KilledWorker

                lost = (*lost, KilledWorker)
                local = {"n_workers": workers if workers > 0 else os.cpu_count(), "threads_per_worker": 1}
                stack.enter_context(Client(address) if address else Client(**local, dashboard_address=None))
            if backend == "ray":
                import ray  # type: ignore[import-not-found]
                from ray.util.joblib import register_ray  # type: ignore[import-not-found]

                ray.init(address=address, log_to_driver=False)
                stack.callback(ray.shutdown)
                register_ray()
        except ImportError as error:
            raise BadInput(
                f"backend {backend} needs {error.name}: pip install 'mismatch-sandbox[{backend}]'"
            ) from error
        except (OSError, TimeoutError, ValueError) as error:
            raise BadInput(f"backend {backend}: no cluster at {address}: {error}") from error
        stack.enter_context(joblib.parallel_config(backend, n_jobs=workers))
        try:
            yield
        except lost as error:
            raise BadInput(f"a worker died; every finished task is in {folder}, go on with --resume") from error


def as_they_come(calls: Iterable[Any]) -> Iterator[tuple[str, pl.DataFrame]]:
    """Results in order of completion; in waves where the backend can only give them all at once."""
    try:
        pool: Any = joblib.Parallel(**ONE_BY_ONE, return_as="generator_unordered")
    except ValueError:
        calls, size = iter(calls), 4 * joblib.effective_n_jobs()
        with joblib.Parallel(**ONE_BY_ONE) as pool:  # one pool of processes for all waves
            while wave := list(itertools.islice(calls, size)):
                yield from pool(wave)
    else:
        yield from pool(calls)
