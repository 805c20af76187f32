"""Seconds, for ratios within one run."""

import time
from collections.abc import Callable


def best(work: Callable[[], object], repeats: int = 5, clock: Callable[[], float] = time.perf_counter) -> float:
    """Seconds of the fastest of several calls, by the wall's clock or the processor's."""
    times = []
    for _ in range(repeats):
        start = clock()
        work()
        times.append(clock() - start)
    return min(times)
