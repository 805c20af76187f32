"""`make bench`: ratios within one run on this machine; nothing here is a test."""

import os
import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch

from benchmarks import exact, plain
from sandbox import problems, simulate
from sandbox.batch import Batch
from sandbox.corrections import CORRECTIONS
from sandbox.diagnostics import ess, sequence_log_weight


def best(work: Callable[[], object], repeats: int = 5, clock: Callable[[], float] = time.perf_counter) -> float:
    """Seconds of the fastest of several calls."""
    times = []
    for _ in range(repeats):
        start = clock()
        work()
        times.append(clock() - start)
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


def simulator(runs: int = 64, steps: int = 200) -> None:
    """Training of the depth-6 tree, N = 256, many runs at once against the plain loop; population ESS off in both.

    Seconds are the best of three, of the processor (one thread against one) and of the clock (all cores against one).
    The plain loop's are those of 3 runs, scaled.
    """
    problem = problems.sparse_tree(np.random.default_rng(0))
    start, few = np.zeros(problem.shape), 3
    print(f"simulation of {runs} runs of {steps} steps, plain loop over ours, and our seconds")
    for name in ("none", "tis", "dlc"):
        config = simulate.SimConfig(CORRECTIONS[name], steps=steps, readings=False)

        def ours(threads: int, config: simulate.SimConfig = config) -> None:
            simulate.run(problem, start, config, range(runs), threads)

        def loop(name: str = name) -> None:
            for run in range(few):
                plain.train(np.random.default_rng(run), problem, 1.0, 256, steps, name)

        simulate.run(problem, start, replace(config, steps=1))  # compiles
        cpu = best(loop, 3, time.process_time) / few * runs, best(lambda: ours(1), 3, time.process_time)
        clock = best(loop, 3) / few * runs, best(lambda: ours(os.cpu_count() or 1), 3)
        print(f"  {name:5} one thread {cpu[0] / cpu[1]:5.1f} ({cpu[1]:.2f} s)", end="")
        print(f"   {os.cpu_count()} threads {clock[0] / clock[1]:5.1f} ({clock[1]:.2f} s)")


if __name__ == "__main__":
    torch.set_num_threads(1)
    corrections()
    simulator()
    exact.main()
