"""`make bench`: ratios within one run on this machine; nothing here is a test."""

import numpy as np
import torch

from benchmarks import corrections
from benchmarks.clock import best
from sandbox import problems, simulate
from sandbox.corrections import CORRECTIONS


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
    corrections.main()
    corrections.top_k()
    runs_at_once()
