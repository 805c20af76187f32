"""`make bench`: ratios within one run on this machine; nothing here is a test."""

import os
import time
from dataclasses import replace

import numpy as np
import torch

from benchmarks import corrections, exact, plain, sweep
from benchmarks.clock import best
from sandbox.corrections import CORRECTIONS
from sandbox.tabular import problems, simulate


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
    corrections.main()
    corrections.top_k()
    simulator()
    exact.main()
    sweep.main()
