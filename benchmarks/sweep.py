"""Sweeps: wall clock of one worker over that of two, and what the scheduler adds to tasks of a second."""

import tempfile
import time
from pathlib import Path

import joblib
import numpy as np
import polars as pl

from sandbox import problem_json, results, sweep
from sandbox.corrections import CORRECTIONS
from sandbox.mismatch import EveryK
from sandbox.problems import Case
from sandbox.sweep import SweepConfig

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


def seconds(grid: SweepConfig, workers: int) -> float:
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        sweep.run(grid, Path(folder) / "run", workers=workers)
        return time.perf_counter() - start


def main() -> None:
    """Workers are started and their code is loaded before the clock runs, as in a long sweep."""
    joblib.Parallel(2)(joblib.delayed(problem_json.named)("bandit") for _ in range(4))
    runs = GRID.runs * len(sweep.tasks(GRID))
    one, two = seconds(GRID, 1), seconds(GRID, 2)
    print(f"sweep of {runs} runs: one worker over two {one / two:.2f} ({two:.1f} s)")
    for backend in ("loky", "dask"):
        print(f"tasks of a second on two {backend} workers: {overhead(backend):.1%} on top of the work")


def overhead(backend: sweep.Backend, tasks: int = 16) -> float:
    """What sending arguments, scheduling and writing parts add to tasks that only wait, one second each."""
    grid = SweepConfig(("sparse_tree",), runs=32 * tasks, steps=20, start="uniform")
    case = problem_json.named("sparse_tree")
    (cell,), shares = sweep.cells(grid), [share for _, share in sweep.tasks(grid)]
    against = sweep.Reference(
        np.zeros((2 * grid.runs, *case.problem.shape)), np.zeros((2 * grid.runs, grid.steps)), 1.0
    )
    with tempfile.TemporaryDirectory() as folder, sweep.workers_of(2, backend, None, Path(folder)):
        list(sweep.as_they_come(joblib.delayed(wait)(0.0, case, cell, share, against.of(share)) for share in shares))
        start = time.perf_counter()
        calls = (joblib.delayed(wait)(1.0, case, cell, share, against.of(share)) for share in shares)
        for name, table in sweep.as_they_come(calls):
            results.write_table(Path(folder) / name, table)
        return 2 * (time.perf_counter() - start) / tasks - 1


def wait(
    seconds: float, case: Case, cell: sweep.Cell, runs: range, against: sweep.Reference
) -> tuple[str, pl.DataFrame]:
    """In the place of `sweep.done`."""
    time.sleep(seconds)
    return sweep.part(cell, runs), pl.DataFrame({"run": runs})


if __name__ == "__main__":
    main()
