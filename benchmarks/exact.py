"""Exact quantities of a long machine: seconds of each at T = 4096, and how they grow with T (cost ~ T^exponent)."""

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np

from sandbox.corrections import CORRECTIONS
from sandbox.experiments.exact_report import CORRECTIONS as SIX
from sandbox.tabular import bias, exact, problems
from sandbox.tabular.policy import policies_of
from sandbox.tabular.problems import Case, Problem

HORIZONS = 4 ** np.arange(3, 9)  # 64 .. 65536
BUDGET = {"ESS": 0.010, "all above": 0.5}  # seconds at T = 4096


def quantities(case: Case) -> dict[str, Callable[[Problem], object]]:
    three = policies_of(case)
    pi, mu, q = three
    corrections = {name: CORRECTIONS[name] for name in SIX}

    def everything(problem: Problem) -> None:
        for work in list(table.values())[:-2]:
            work(problem)

    table: dict[str, Callable[[Problem], object]] = {
        "ESS": lambda p: exact.ess(p, pi, q),
        "D2": lambda p: exact.renyi2(p, pi, q),
        "KL(pi, q)": lambda p: exact.kl(p, pi, q),
        "KL(q, pi)": lambda p: exact.kl(p, q, pi),
        "occupancies": lambda p: exact.occupancy(p, q),
        "gradient": lambda p: exact.gradient(p, pi),
        "six updates": lambda p: exact.expected_updates(p, three, corrections),
        "all above": everything,
        "bias split": lambda p: bias.split(p, mu, mu - q),
    }
    return table


def seconds(work: Callable[[], object], repeats: int = 3) -> float:
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return min(times)


def main() -> None:
    case = problems.PRESETS["long"]()
    states, vocabulary = case.problem.shape
    print(f"exact quantities, S = {states}, V = {vocabulary}, in ms, and the exponent fitted over all T")
    print(f"  {'T':12}" + "".join(f"{t:9}" for t in HORIZONS) + " exponent")
    for name, work in quantities(case).items():
        times = []
        for horizon in HORIZONS:  # a fresh problem each time: nothing that it may have cached is left out
            fresh = partial(replace, case.problem, horizon=int(horizon))
            times.append(seconds(lambda work=work, fresh=fresh: work(fresh())))
        exponent = np.polyfit(np.log(HORIZONS), np.log(times), 1)[0]
        budget = f"  at most {BUDGET[name] * 1e3:.0f} at T = 4096" if name in BUDGET else ""
        print(f"  {name:12}" + "".join(f"{1e3 * t:9.2f}" for t in times) + f"{exponent:9.2f}{budget}")


if __name__ == "__main__":
    main()
