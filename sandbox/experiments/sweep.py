"""`mismatch sweep`: a grid of simulated trainings over local cores or a cluster; resumable, the same bits on each.

A cell is one problem, step size, correction, discrepancy and resync rule. A task is some runs of one cell, trained side
by side. Run i has the i-th generator of the seed in every cell. So results depend on the config alone, not on the
backend, the workers, the order, or how runs are shared out. Every finished task is a Parquet part in the run folder. A
kill loses only the tasks in flight, and resuming does the missing ones.

Each run is compared with on-policy training (exact sampler, synced after every update) of the same problem, step size
and generator. Compared are its failure_step, and KL(on-policy || run) of whole sequences at the end, in units of the KL
between two on-policy runs of different generators. On-policy training is tasks too; they are done first.
"""

import hashlib
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

import joblib
import numpy as np
import polars as pl

from sandbox.corrections import CORRECTIONS, RESYNCS, Correction, EveryK, Resync, presets
from sandbox.errors import BadInput
from sandbox.experiments import cluster, predict
from sandbox.output import config, problem_json, report, run_folder
from sandbox.tabular import exact, simulate
from sandbox.tabular.policy import ConstantOffset
from sandbox.tabular.problems import Case
from sandbox.tabular.simulate import SimConfig
from sandbox.theory import collapse

MOST_CELLS = 10**6


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
    """On-policy training of one problem and step size, twice as many runs as a cell has.

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


class Task(NamedTuple):
    """Some runs of a cell; of on-policy training where there is no cell."""

    problem: str
    step_size: float
    cell: Cell | None
    number: int
    runs: range

    @property
    def part(self) -> str:
        """Name of the file that its results go to."""
        kind = "part" if self.cell else "reference"
        return f"{kind}-{self.number:06d}-{self.runs.start:06d}.parquet"


def axes(sweep: SweepConfig) -> tuple[Sequence[Any], ...]:
    """In the order of a cell's fields."""
    return sweep.problems, sweep.step_sizes, sweep.corrections, sweep.discrepancies, sweep.resyncs


def cells(sweep: SweepConfig) -> Iterator[Cell]:
    """Every cell, in order."""
    yield from (Cell(number, *point) for number, point in enumerate(itertools.product(*axes(sweep))))


def tasks(sweep: SweepConfig) -> list[Task]:
    """Every task, on-policy training first."""

    def shares(runs: int) -> list[range]:
        return [range(i, min(i + sweep.together, runs)) for i in range(0, runs, sweep.together)]

    pairs = enumerate(itertools.product(sweep.problems, sweep.step_sizes))
    on_policy = [Task(*pair, None, number, share) for number, pair in pairs for share in shares(2 * sweep.runs)]
    return on_policy + [
        Task(cell.problem, cell.step_size, cell, cell.number, share)
        for cell in cells(sweep)
        for share in shares(sweep.runs)
    ]


def run(
    sweep: SweepConfig,
    folder: Path,
    resume: bool = False,
    workers: int = -1,
    backend: cluster.Backend = "loky",
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
    Raises BadInput: another config's folder, or one that another process is at; a damaged part; a problem that cannot
    be read; a dead worker or cluster.
    """
    cases = {name: problem_json.named(name) for name in sweep.problems}
    asked = config.resolved(sweep) | {"digests": [_digest(case) for case in cases.values()]}
    every = tasks(sweep)
    if resume:
        run_folder.begin_run(folder, asked, resume)  # refuses a folder without this run
    with (
        cluster.workers_of(workers, backend, address, folder),
        run_folder.alone(folder),
        run_folder.recorded(folder, asked, resume),
    ):
        tables = {task: _read(path, task) for task in every if (path := folder / "parts" / task.part).exists()}
        wanted = {task[:2] for task in every if task.cell and task not in tables}
        missing = [task for task in every if task not in tables and task[:2] in wanted]
        todo = len(missing)
        progress(len(every) - todo, len(every))

        def do(calls: Iterable[Any]) -> None:
            nonlocal todo
            for task, table in cluster.as_they_come(calls):
                run_folder.write_table(folder / "parts" / task.part, table)
                tables[task] = table
                todo -= 1
                progress(len(every) - todo, len(every))

        do(joblib.delayed(on_policy)(sweep, cases[task.problem], task) for task in missing if not task.cell)
        fresh = [task for task in every if not task.cell and task[:2] in wanted]
        against = {
            pair: _reference(sweep, cases[pair[0]], [tables[task] for task in shares])
            for pair, shares in itertools.groupby(fresh, lambda task: task[:2])
        }
        do(
            joblib.delayed(done)(sweep, cases[task.problem], task, against[task[:2]].of(task.runs))
            for task in missing
            if task.cell
        )
        table = pl.concat([tables[task] for task in every if task.cell])
        run_folder.write_table(folder / "runs.parquet", table)
    return table


def on_policy(sweep: SweepConfig, case: Case, task: Task) -> tuple[Task, pl.DataFrame]:
    """A task of on-policy training and its part: a row a run, `logp` (S V,) at the end, `returns` (steps,)."""
    training = Cell(0, "", task.step_size, CORRECTIONS["none"], 0.0, EveryK(1)).training(sweep)
    trained = simulate.run(case.problem, predict.start_of(case, sweep.start), training, task.runs)
    rows = {
        "run": np.array(task.runs),
        "logp": trained.state.policies.train.reshape(len(task.runs), -1),
        "returns": trained.table["return"].to_numpy().reshape(len(task.runs), -1),
    }
    return task, pl.DataFrame(rows)


def _reference(sweep: SweepConfig, case: Case, parts: list[pl.DataFrame]) -> Reference:
    """What the parts of on-policy training say together."""
    table = pl.concat(parts)
    logp = table["logp"].to_numpy().reshape(-1, *case.problem.shape)
    unit = exact.kl(case.problem, logp[: sweep.runs], logp[sweep.runs :]).mean()
    return Reference(logp, table["returns"].to_numpy(), float(unit))


def done(sweep: SweepConfig, case: Case, task: Task, against: Reference) -> tuple[Task, pl.DataFrame]:
    """A task of a cell and its part: its rows, as `run` returns them.

    Args:
        against: its `logp` of these runs alone.
    """
    assert task.cell
    training = task.cell.training(sweep)
    trained = simulate.run(case.problem, predict.start_of(case, sweep.start), training, task.runs)
    return task, _rows(sweep, case, task.cell, task.runs, against, trained)


def _read(path: Path, task: Task) -> pl.DataFrame:
    """A part that an earlier call has left."""
    try:
        table = pl.read_parquet(path)
        whole = table["run"].to_list() == list(task.runs)
    except (pl.exceptions.PolarsError, OSError):
        whole = False
    if not whole:
        raise BadInput(f"part {path} is damaged: delete it, and --resume makes it anew")
    return table


def _rows(
    sweep: SweepConfig, case: Case, cell: Cell, runs: range, against: Reference, trained: simulate.Result
) -> pl.DataFrame:
    returns = trained.table["return"].to_numpy().reshape(len(runs), -1)
    fails = 1 + collapse.failure_steps(returns, against.returns)  # the first measurement follows the first update
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
    _, fresh = on_policy(sweep, case, Task(cell.problem, cell.step_size, None, 0, range(2 * sweep.runs)))
    table = _rows(sweep, case, cell, runs, _reference(sweep, case, [fresh]).of(runs), trained)
    return trained.table, summary(table).to_dicts()[0]


def summary(table: pl.DataFrame) -> pl.DataFrame:
    """A row a cell: upper medians of the two steps over its runs (inf counts as a number), means of the rest."""
    names = ["problem", "step_size", "correction", "discrepancy", "resync", "staleness"]
    middle = [pl.col(name).sort().get(pl.len() // 2) for name in ("ess_step", "failure_step")]
    means = [pl.col(name).mean() for name in ("return", "return_sampler", "syncs", "kl")]
    return table.group_by("cell", *names, maintain_order=True).agg(pl.len().alias("runs"), *middle, *means).drop("cell")


def shown(sweep: SweepConfig, rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows of `summary` as people read them: numbered, for a wide table is split."""
    steps = ("ess_step", "failure_step")
    worded = [{name: report.update_or_none(row[name], sweep.steps) for name in steps} for row in rows]
    return [{"cell": i} | row | words for i, (row, words) in enumerate(zip(rows, worded, strict=True))]


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
