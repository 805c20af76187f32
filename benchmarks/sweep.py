"""Sweeps: wall clock of one worker over that of two, and what the scheduler adds to tasks of a second."""

import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import joblib
import numpy as np
import polars as pl

from sandbox.corrections import CORRECTIONS, EveryK
from sandbox.experiments import cluster, sweep
from sandbox.experiments.sweep import SweepConfig
from sandbox.output import problem_json, run_folder
from sandbox.tabular.problems import Case

GRID = SweepConfig(
    ("sparse_tree",),
    tuple(CORRECTIONS[name] for name in ("none", "tis", "dlc", "cis")),
    (EveryK(2), EveryK(8)),
    (0.0, 0.1, 0.2, 0.4),
    (0.5, 1.0),
    runs=32,
    steps=20,
    start="uniform",
)
CELL = SweepConfig(("sparse_tree",), runs=2048, steps=8, start="uniform")


def seconds(grid: SweepConfig, workers: int) -> float:
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        sweep.run(grid, Path(folder) / "run", workers=workers)
        return time.perf_counter() - start


def main() -> None:
    """Workers are started and their code is loaded before the clock runs, as in a long sweep."""
    joblib.Parallel(2)(joblib.delayed(problem_json.named)("bandit") for _ in range(4))
    for what, grid in (("64 cells of 32 runs", GRID), ("one cell of 2,048 runs", CELL)):
        one, two = seconds(grid, 1), seconds(grid, 2)
        print(f"sweep of {what}: one worker over two {one / two:.2f} ({one:.1f}, {two:.1f} s)", flush=True)
    for backend in ("loky", "dask"):
        print(f"tasks of a second on two {backend} workers: {overhead(backend):.1%} on top of the work")


def overhead(backend: cluster.Backend, tasks: int = 16) -> float:
    """What sending arguments, scheduling and writing parts add to tasks that only wait, one second each."""
    grid = SweepConfig(("sparse_tree",), runs=32 * tasks, steps=20, start="uniform")
    case = problem_json.named("sparse_tree")
    shares = [task for task in sweep.tasks(grid) if task.cell]
    against = sweep.Reference(
        np.zeros((2 * grid.runs, *case.problem.shape)), np.zeros((2 * grid.runs, grid.steps)), 1.0
    )

    def calls(seconds: float) -> Iterator[Any]:
        return (joblib.delayed(wait)(seconds, case, task, against.of(task.runs)) for task in shares)

    with tempfile.TemporaryDirectory() as folder, cluster.workers_of(2, backend, None, Path(folder)):
        list(cluster.as_they_come(calls(0.0)))
        start = time.perf_counter()
        for task, table in cluster.as_they_come(calls(1.0)):
            run_folder.write_table(Path(folder) / task.part, table)
        return 2 * (time.perf_counter() - start) / tasks - 1


def wait(seconds: float, case: Case, task: sweep.Task, against: sweep.Reference) -> tuple[sweep.Task, pl.DataFrame]:
    """In the place of `sweep.done`."""
    time.sleep(seconds)
    return task, pl.DataFrame({"run": task.runs})


if __name__ == "__main__":
    main()
