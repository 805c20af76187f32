"""`make bench`: ratios within one run on this machine; nothing here is a test."""

import time
from collections.abc import Callable

import numpy as np
import torch

from benchmarks import exact
from sandbox import problems, simulate
from sandbox.batch import Batch
from sandbox.corrections import CORRECTIONS
from sandbox.diagnostics import ess, sequence_log_weight


def best(work: Callable[[], object], repeats: int = 5) -> float:
    """Seconds of the fastest of several calls."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return min(times)


def corrections() -> None:
    """Weights of each correction on [512, 4096] float32 torch tokens, in passes of one element-wise addition."""
    rng = np.random.default_rng(0)
    rollout = torch.tensor(-rng.exponential(size=(512, 4096)), dtype=torch.float32)
    train = torch.minimum(
        rollout + 0.02 * torch.randn(rollout.shape, generator=torch.Generator().manual_seed(0)), rollout * 0
    )
    batch = Batch(train, rollout, torch.ones(rollout.shape, dtype=torch.bool), torch.ones(512, 1), rollout)
    addition = best(lambda: train + rollout)
    print(f"corrections on [512, 4096], in passes of one addition ({addition * 1e3:.1f} ms)")
    for name, correction in CORRECTIONS.items():
        if not correction.centres:
            print(f"  {name:8} {best(lambda c=correction: c(batch)) / addition:6.1f}")
    print(f"  {'ESS':8} {best(lambda: ess(sequence_log_weight(batch, 'lag'))) / addition:6.1f}")


def runs_at_once() -> None:
    """Simulated training runs of the depth-6 tree: 16 at once against 16 times one."""
    problem = problems.sparse_tree(np.random.default_rng(0))
    config = simulate.SimConfig(steps=20, correction=CORRECTIONS["tis"])
    start = np.zeros(problem.shape)
    one = best(lambda: [simulate.run(problem, start, config, runs=[i]) for i in range(16)], repeats=2)
    many = best(lambda: simulate.run(problem, start, config, runs=range(16)), repeats=2)
    print(f"simulation of 16 runs: at once {one / many:.1f} times as fast as one by one")


if __name__ == "__main__":
    torch.set_num_threads(1)
    corrections()
    runs_at_once()
    exact.main()
