"""What an experiment answers: a claim with its criterion, the row that a run of it fills in, intervals, read-offs."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Literal, NamedTuple

import numpy as np
import polars as pl
from matplotlib.axes import Axes

from sandbox.tabular import exact, problems, simulate
from sandbox.tabular.policy import log_policy
from sandbox.tabular.problems import Problem
from sandbox.tabular.simulate import SimConfig

Verdict = Literal["holds", "fails", "by construction", "not tested"]
EXACT = (math.nan, math.nan)  # the interval of a number without noise
RESAMPLES = 2000


@dataclass(frozen=True, eq=False)
class Outcome:
    """What one experiment measured.

    value: the number that the criterion is about. interval: its 95 % interval, nan where it has no noise.
    n: runs, policies or steps behind it. reason: why this verdict. measured: further numbers. table: for the figure.
    """

    value: float
    verdict: Verdict
    reason: str
    n: int
    interval: tuple[float, float] = EXACT
    measured: dict[str, Any] = field(default_factory=dict)
    table: pl.DataFrame = field(default_factory=pl.DataFrame)


@dataclass(frozen=True)
class Claim:
    """statement, criterion and threshold are written down before any run; `experiment` measures.

    experiment: of (threshold, fast, seed) in the sandbox, of the study of all real runs in `realmodel.studies.claims`.
    figure: fn(ax, table) -> ax, where there is something to draw.
    """

    id: str
    statement: str
    criterion: str
    threshold: float
    experiment: Callable[..., Outcome]
    figure: Callable[[Axes, pl.DataFrame], Axes] | None = None


def judge(holds: bool) -> Verdict:
    """Of a criterion that is met or not."""
    return "holds" if holds else "fails"


def bootstrap(
    statistic: Callable[..., np.ndarray], *samples: np.ndarray, paired: bool = False, seed: int = 0
) -> tuple[float, float]:
    """2.5 and 97.5 % quantiles of `statistic` over 2,000 resamplings of the runs of each sample.

    Args:
        statistic: reduces the last axis of every sample.
        samples: one number a run. (R,) each
        paired: the samples share their seeds, and are drawn together.
    """
    rng = np.random.default_rng(seed)
    picks = [rng.integers(len(x), size=(RESAMPLES, len(x))) for x in samples[: 1 if paired else None]]
    picks = picks * len(samples) if paired else picks
    values = statistic(*(x[pick] for x, pick in zip(samples, picks, strict=True)))
    # no interpolation, which is undefined beside an infinite step
    low, high = np.quantile(values, 0.025, method="lower"), np.quantile(values, 0.975, method="higher")
    return float(low), float(high)


def difference(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Of the means of two samples. (..., n), (..., m) -> (...)"""
    return a.mean(axis=-1) - b.mean(axis=-1)


def median(x: np.ndarray) -> np.ndarray:
    """Lower median: defined beside infinite steps. (..., n) -> (...)"""
    return np.quantile(x, 0.5, axis=-1, method="lower")


def compared(statistic: Callable[..., np.ndarray], *samples: np.ndarray, paired: bool = False) -> list[float]:
    """The statistic and its `bootstrap` interval: [value, low, high]. Samples (n,)"""
    return [float(statistic(*samples)), *bootstrap(statistic, *samples, paired=paired)]


def share_lost(run: np.ndarray, on_policy: np.ndarray, start: float) -> list[float]:
    """How much of the on-policy gain over the `start` return a run does not reach: [value, low, high]. (R,), (m,)"""
    gain = float(on_policy.mean()) - start
    return compared(lambda a, b: difference(b, a) / gain, run, on_policy)


class Setting(NamedTuple):
    """A problem, started from the uniform policy, and how it is trained."""

    problem: Problem
    cfg: SimConfig

    @property
    def start(self) -> np.ndarray:
        """Logits 0. (S, V)"""
        return np.zeros(self.problem.shape)


def designed() -> Problem:
    """A problem made for C9, where the discrepancy of one state adds up over a long response: half of the 16 first
    tokens earn 1, the others end the response; then 255 tokens of one state, one of 16 earning 1 / 255."""
    transition, reward = np.zeros((2, 16), dtype=int), np.zeros((2, 16))
    transition[0, :8], transition[0, 8:], transition[1] = 1, problems.END, 1
    reward[0, :8], reward[1, 0] = 1.0, 1 / 255
    return Problem(transition, reward, horizon=256)


@lru_cache
def setting(name: str, seed: int = 0) -> Setting:
    """`machine` and `tree`: the sparse ones of THEORY section 6. `penalised`: the machine with one optimum, KL to the
    uniform start in the objective. `designed`: C9's, whatever the seed. Step sizes of the first three leave 5 updates
    or more to the uncorrected ess_step of seed 0; `seed` draws the problem and is the root of its runs."""
    if name == "tree":
        return Setting(
            problems.PRESETS["sparse_tree"](seed).problem, SimConfig(step_size=1.0, batch_size=256, seed=seed)
        )
    if name == "designed":
        return Setting(designed(), SimConfig(step_size=0.1, batch_size=64, seed=seed))
    plain = SimConfig(step_size=0.0625, batch_size=128, seed=seed)
    one_optimum = SimConfig(step_size=1.5, batch_size=128, advantage="centred", penalty=0.01, seed=seed)
    return Setting(problems.PRESETS["machine"](seed).problem, one_optimum if name == "penalised" else plain)


def updates(name: str, fast: bool) -> int:
    """Enough of them for on-policy training to be nearly done; a fourth where it must be fast."""
    steps = {"machine": 200, "penalised": 300, "tree": 60, "designed": 300}[name]
    return steps // 4 if fast else steps


class Trained(NamedTuple):
    """Runs of one config. (R, K + 1) curves, the start included; (R, K) readings after each update."""

    returns: np.ndarray
    ess: np.ndarray
    token_kl: np.ndarray
    since_sync: np.ndarray
    syncs: np.ndarray  # at the end, (R,)
    logits: np.ndarray  # (R, S, V)
    log_offset: np.ndarray  # (R, S, V)
    final: np.ndarray  # what training maximises: mean return over the last tenth, less beta KL at the end. (R,)

    def ess_steps(self, threshold: float = 0.5) -> np.ndarray:
        """Updates since the sync when the population ESS first was below the threshold; inf for never. (R,)"""
        below = self.ess < threshold
        first = self.since_sync[np.arange(len(below)), below.argmax(axis=1)]
        return np.where(below.any(axis=1), first, np.inf)


@lru_cache(maxsize=256)
def train(problem_name: str, cfg: SimConfig, runs: int, first: int = 0) -> Trained:
    """Runs `first` .. of a setting under `cfg`; kept, so that experiments share them."""
    problem, _ = setting(problem_name, cfg.seed)
    start = np.zeros(problem.shape)
    table, state = simulate.run(problem, start, cfg, range(first, first + runs), threads=2)

    def curve(column: str) -> np.ndarray:
        return table[column].to_numpy().reshape(runs, cfg.steps)

    before = np.full((runs, 1), exact.expectation(problem, log_policy(start), problem.reward))
    returns = np.concatenate([before, curve("return")], axis=1)
    ess, token_kl, since_sync = (curve(name) for name in ("ess", "token_kl", "since_sync"))
    logits, uniform = np.array(state.trainer), log_policy(start)
    penalty = cfg.penalty * exact.kl(problem, log_policy(logits), uniform) if cfg.penalty else 0.0
    final = returns[:, -max(1, cfg.steps // 10) :].mean(axis=1) - penalty
    return Trained(returns, ess, token_kl, since_sync, state.syncs, logits, np.array(state.log_offset), final)
