"""What threshold, what staleness? `python -m benchmarks.staleness` prints the tables; minutes, single-threaded.

Per problem and correction: the best ESS threshold and the best period at each cost of a sync, in the mean field and in
Monte Carlo runs, with what 1/2 loses as a share of the best gain. Budgets end before the return saturates.
"""

import sys
from dataclasses import dataclass

import numpy as np
import polars as pl

from sandbox.corrections import CORRECTIONS
from sandbox.experiments import staleness
from sandbox.tabular import exact, problems
from sandbox.tabular.policy import log_policy
from sandbox.tabular.problems import Problem
from sandbox.tabular.simulate import SimConfig


@dataclass(frozen=True)
class Case:
    name: str
    problem: Problem
    step_size: float
    budget: int
    batch_size: int


def cases() -> list[Case]:
    """A dense reward at length 64, a rare success, a rare failure."""
    rng = np.random.default_rng
    return [
        Case("16-state machine, T = 64", problems.state_machine(rng(0), 16, 4, 64), 0.25, 40, 128),
        Case("tree, best 10 % rewarded", problems.sparse_tree(rng(0), depth=4), 1.0, 40, 256),
        Case("tree, worst 10 % punished", problems.sparse_tree(rng(0), depth=4, top=0.9), 1.0, 40, 256),
    ]


def main(names: list[str], runs: int = 16) -> None:
    """Tables for the named corrections."""
    pl.Config(tbl_rows=20, tbl_cols=12, tbl_width_chars=170, tbl_hide_dataframe_shape=True, float_precision=4)
    for case in cases():
        logits = np.zeros(case.problem.shape)
        start = float(exact.expectation(case.problem, log_policy(logits), case.problem.reward))
        for name in names:
            correction, steps = CORRECTIONS[name], case.budget
            print(f"\n{case.name}, {name}, step size {case.step_size}, budget {case.budget}, start {start:.3f}")
            if correction.factors or name == "seq_is":
                field = staleness.mean_field_runs(
                    case.problem, logits, SimConfig(correction, step_size=case.step_size, steps=steps)
                )
                print("mean field", staleness.optimum(staleness.at_budget(field, case.budget), start))
            cfg = SimConfig(correction, step_size=case.step_size, batch_size=case.batch_size, steps=steps)
            drawn = staleness.monte_carlo_runs(case.problem, logits, cfg, range(runs))
            reached = staleness.at_budget(drawn, case.budget)
            print(f"Monte Carlo, {runs} runs", staleness.optimum(reached, start))
            print("largest standard error", reached["standard_error"].max(), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:] or ["none", "tis", "seq_tis"])
