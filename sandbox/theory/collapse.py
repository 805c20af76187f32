"""Two events from measured curves: `ess_step` is predicted, `failure_step` is read off. They have different names.

ess_step: optimiser updates since the sync until the sequence ESS of the lag is below a threshold. Its prediction from
the first measured Var[log w] extrapolates a k^2 + b k, or a ((e^(gamma k) - 1) / gamma)^2 + b k, to ln(1 / threshold)
(THEORY section 6). failure_step: first lasting drop of the return, or pass rate, more than 3 standard errors below
on-policy. "No collapse" is inf, a valid prediction; nan is "not identifiable". Tabular and real runs share all of this.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from sandbox.errors import BadInput

FIT_SHARE = 1 / 8  # a fit uses steps with Var <= ln(1 / threshold) / 8 only, so that what it predicts is out of sample
FIT_POINTS = 3  # fewer points than this identify nothing
FIT_RESAMPLES = 200
CURVED_POINTS = 5  # fewer than this and gamma is 0: three free parameters need two points to spare
CURVATURE = 0.5  # prior standard deviation of gamma times the last step fitted: least error over -.6, 0 and .6
CURVATURES = np.linspace(-4, 4, 161)  # gamma times the last step fitted, searched over
LONGEST = 2**60  # more updates than this are none
STANDARD_ERRORS = 3.0
LASTING = 5  # a drop counts if it lasts for this many measurements


def var_threshold(threshold: float) -> float:
    """Var[log w] of a log-normal weight with ESS = threshold: ln(1 / threshold). Raises BadInput outside (0, 1)."""
    if not 0 < threshold < 1:
        raise BadInput(f"threshold is {threshold}, expected a number in (0, 1)")
    return -math.log(threshold)


def quadratic_step(a: float, b: float, threshold: float = 0.5) -> float:
    """First integer k with a k^2 + b k >= ln(1 / threshold), for a, b >= 0; inf where there is none."""
    level = var_threshold(threshold)
    root = b + math.sqrt(b * b + 4 * a * level)
    steps = 2 * level / root if root > 0 else math.inf
    return float(math.ceil(steps - 1e-9)) if steps <= LONGEST else math.inf


def curved(gamma: float, k: np.ndarray) -> np.ndarray:
    """(e^(gamma k) - 1) / gamma, which is k at gamma = 0: how far a drift has carried after k steps of a loop. (n,)"""
    k = np.asarray(k, dtype=float)
    return np.expm1(gamma * k) / gamma if gamma else k


def curved_step(a: float, b: float, gamma: float, threshold: float = 0.5) -> float:
    """First integer k with a ((e^(gamma k) - 1)/gamma)^2 + b k >= ln(1 / threshold), a, b >= 0; inf for none.

    With gamma < 0 and b = 0 the curve saturates at a / gamma^2 and may never get there.
    """
    level = var_threshold(threshold)
    if gamma == 0:
        return quadratic_step(a, b, threshold)
    if b == 0 and (a == 0 or (gamma < 0 and math.sqrt(a) <= -gamma * math.sqrt(level))):
        return math.inf

    def passed(k: float) -> bool:
        # The root, as its square may overflow.
        drift = math.sqrt(a) * (math.expm1(gamma * k) / gamma if gamma * k < 700 else math.inf) if a else 0.0
        return drift >= math.sqrt(level) or drift**2 + b * k >= level * (1 - 1e-9)

    low, high = 0, 1
    while not passed(high):
        low, high = high, 2 * high
        if high > LONGEST:
            return math.inf
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if passed(middle) else (middle, high)
    return float(high)


@dataclass(frozen=True)
class Fit:
    """Collapse step predicted from the first few measured Var[log w].

    a, b: nats^2 per step^2 and step, >= 0; nan where not identifiable.
    ess_step: first k with Var >= ln(1 / threshold); inf beyond the horizon, nan where not identifiable.
    interval: 5 and 95 % quantiles of ess_step over refits to resampled residuals.
    gamma: curvature per step, 0 unless it was asked for: total curvature, not the loop's alone.
    """

    a: float
    b: float
    ess_step: float
    status: Literal["predicted", "no_collapse_within_horizon", "not_identifiable"]
    points_used: int
    interval: tuple[float, float]
    gamma: float = 0.0

    def curve(self, k: np.ndarray) -> np.ndarray:
        """The fitted Var[log w] at k. (n,)"""
        return self.a * np.square(curved(self.gamma, k)) + self.b * np.asarray(k, dtype=float)


def fit_collapse(
    k: np.ndarray,
    var_log_ratio: np.ndarray,
    threshold: float = 0.5,
    horizon: float = math.inf,
    curvature: bool = False,
) -> Fit:
    """Fit a k^2 + b k, a, b >= 0, to the points with 0 < Var <= ln(1 / threshold) / 8 and extrapolate to the collapse.

    Non-negative least squares with weights 1 / Var^2, since the variance of a sample variance grows with its square;
    the weights use the fitted Var, iterated, because measured ones would favour points that are low by chance. The
    interval refits 200 times to fit x (1 + a relative residual drawn with replacement), seed 0. It takes residuals
    for independent, so it is too narrow where all k share one probe, and without `curvature` it knows nothing of it.

    Args:
        k: optimiser updates since the sync, >= 1. (n,)
        var_log_ratio: measured Var of the sequence log lag ratio, nats^2; nan is left out. (n,)
        horizon: a collapse after more updates than this is not predicted.
        curvature: fit a ((e^(gamma k) - 1)/gamma)^2 + b k, gamma shrunk towards 0: it minimises the relative squared
            residuals over their variance plus (gamma k_last / .5)^2. A free gamma on eight points with 10 % noise
            spreads the predicted step over a range of four times its value. Below five points gamma stays 0.
    Raises BadInput: k and var_log_ratio of different shapes, or a k below 1.
    """
    k, measured = np.asarray(k, dtype=float), np.asarray(var_log_ratio, dtype=float)
    if k.shape != measured.shape or k.ndim != 1:
        raise BadInput(f"k has shape {k.shape} and var_log_ratio {measured.shape}, expected (n,) both")
    if not np.all(k >= 1):
        raise BadInput("k has an entry that is not >= 1; k counts updates since the sync")
    used = (measured > 0) & (measured <= var_threshold(threshold) * FIT_SHARE)
    points = int(used.sum())
    if points < FIT_POINTS:
        return Fit(math.nan, math.nan, math.nan, "not_identifiable", points, (math.nan, math.nan))
    k, target = k[used], measured[used]
    free = curvature and points >= CURVED_POINTS
    gammas = CURVATURES / k.max() if free else np.zeros(1)
    drift = np.stack([np.square(curved(gamma, k)) for gamma in gammas])  # (G, n)

    def fitted(values: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(gamma, (a, b), curve) of each row of values."""
        coefficients = _relative_nnls(drift, k, values[:, None])  # (rows, G, 2)
        curves = coefficients[..., :1] * drift + coefficients[..., 1:] * k
        misfit = np.square(values[:, None] / curves - 1).sum(axis=-1)
        noise = misfit.min(axis=-1, keepdims=True) / max(points - 3, 1)
        cost = misfit / np.maximum(noise, 1e-18) + (gammas * k.max() / CURVATURE) ** 2
        row, best = np.arange(len(values)), cost.argmin(axis=-1)
        return gammas[best], coefficients[row, best], curves[row, best]

    (gamma,), ((a, b),), (curve,) = fitted(target[None])
    picks = np.random.default_rng(0).integers(points, size=(FIT_RESAMPLES, points))
    resampled = fitted(curve * (target / curve)[picks])

    def collapse(a: float, b: float, gamma: float) -> float:
        step = curved_step(a, b, gamma, threshold)
        return step if step <= horizon else math.inf

    ess_step = collapse(float(a), float(b), float(gamma))
    steps = np.sort([collapse(a, b, gamma) for gamma, (a, b) in zip(*resampled[:2], strict=True)])
    interval = (float(steps[int(0.05 * FIT_RESAMPLES)]), float(steps[int(0.95 * FIT_RESAMPLES)]))
    status = "predicted" if math.isfinite(ess_step) else "no_collapse_within_horizon"
    return Fit(float(a), float(b), ess_step, status, points, interval, float(gamma))


def _relative_nnls(first: np.ndarray, second: np.ndarray, values: np.ndarray) -> np.ndarray:
    """a, b >= 0 of least relative squares of a first + b second: residuals over the fitted values, three reweightings.

    Two unknowns, so the non-negative solution is the free one, or that of one column alone. (..., n) -> (..., 2)
    """
    fitted = values
    solution = np.zeros(2)
    for _ in range(4):
        x, y, z = first / fitted, second / fitted, values / fitted
        xx, xy, yy, xz, yz = ((u * v).sum(-1) for u, v in ((x, x), (x, y), (y, y), (x, z), (y, z)))
        determinant = xx * yy - xy * xy
        flat = determinant <= 1e-14 * xx * yy  # two columns that these points cannot tell apart: one will do
        safe = np.where(flat, 1.0, determinant)
        a, b = (xz * yy - yz * xy) / safe, (yz * xx - xz * xy) / safe
        first_alone = xz**2 / xx >= yz**2 / yy
        free = (a >= 0) & (b >= 0) & ~flat
        a = np.where(free, a, np.where(first_alone, xz / xx, 0.0))
        b = np.where(free, b, np.where(first_alone, 0.0, yz / yy))
        solution = np.stack([a, b], axis=-1)
        fitted = solution[..., :1] * first + solution[..., 1:] * second
    return solution


def shortfall(run: np.ndarray, on_policy: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """How far a run's return or pass rate lies below the mean of the on-policy runs, and the standard error of that.

    The error adds two sources: the held-out problems (paired, the same for every run; none where there is one problem,
    whose return is exact) and the training seed, whose variance is pooled over all measurements of the on-policy runs
    and counted once for the run and 1/m for their mean.

    Args:
        run: K measurements by problem. (K, problems)
        on_policy: m >= 2 runs, each (K, problems)
    Returns:
        (difference, standard_error), each (K,); positive differences are below on-policy.
    Raises BadInput for fewer than two on-policy runs.
    """
    if len(on_policy) < 2:
        raise BadInput(f"on_policy has {len(on_policy)} run; the seed's noise needs two")
    difference = np.mean(on_policy, axis=0) - run
    seed_variance = np.var([r.mean(axis=1) for r in on_policy], axis=0, ddof=1).mean()
    problems = difference.shape[1]
    problem_variance = difference.var(axis=1, ddof=1) / problems if problems > 1 else np.zeros(len(difference))
    return difference.mean(axis=1), np.sqrt(problem_variance + seed_variance * (1 + 1 / len(on_policy)))


def failure_step(run: np.ndarray, on_policy: Sequence[np.ndarray]) -> float:
    """First measurement from which the run is more than 3 standard errors below on-policy 5 times in a row; else inf.

    With a measurement before the first update and after each, that is a number of updates.
    """
    difference, error = shortfall(run, on_policy)
    failed = difference > STANDARD_ERRORS * error
    for step in range(len(failed) - LASTING + 1):
        if failed[step : step + LASTING].all():
            return float(step)
    return math.inf


def failure_steps(returns: np.ndarray, on_policy: np.ndarray) -> np.ndarray:
    """`failure_step` of each run against all on-policy runs, of exact returns; inf for never. (R, K), (m, K) -> (R,)"""
    references = list(on_policy[:, :, None])
    return np.array([failure_step(run[:, None], references) for run in returns])
