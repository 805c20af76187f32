"""A constant pipeline lag: the sampler always runs `tau` updates behind the trainer. When is that loop stable?

    theta_{k+1} = theta_k + eta (H theta_k + M theta_{k-tau} + c)                                     THEORY section 5
around a fixed point: H feeds back what the trainer does now, M what it did `tau` updates ago. A mode z^k solves
    det(z^{tau+1} I - (I + eta H) z^tau - eta M) = 0,
the eigenvalues of a companion matrix; H and M need not commute. The loop forgets a disturbance iff all |z| < 1.
Scalar, H = 0, M = -kappa: iff 0 < eta kappa < 2 sin(pi / (2 (2 tau + 1))) (Levin and May 1976; a test
derives it). Matrices are (n, n); a number is a (1, 1) matrix. tau counts updates.
"""

import itertools
import math

import numpy as np
from scipy.optimize import brentq

from sandbox.errors import BadInput, positive

GRID = 600  # step sizes looked at for the first loss of stability, from 1e-4 to 1e3 over the size of H and M
NULL = 1e-10  # a direction whose singular value is below this share of the largest moves nothing


def critical_gain(tau: int) -> float:
    """Largest stable eta kappa at H = 0, M = -kappa: 2 sin(pi / (2 (2 tau + 1))) = 2, 1, .618, .445 .. (Levin-May).

    Raises BadInput for a negative tau.
    """
    if tau < 0:
        raise BadInput(f"tau is {tau}, expected at least 0")
    return 2 * math.sin(math.pi / (2 * (2 * tau + 1)))


def companion(h: np.ndarray | float, m: np.ndarray | float, step_size: float, tau: int) -> np.ndarray:
    """Matrix that moves (theta_k, theta_{k-1}, .., theta_{k-tau}) on by one update. (n (tau + 1), n (tau + 1))

    Raises BadInput for a negative tau or matrices of other shapes.
    """
    h, m = _square(h, m)
    positive("step_size", step_size)
    if tau < 0:
        raise BadInput(f"tau is {tau}, expected at least 0")
    n = len(h)
    matrix = np.eye(n * (tau + 1), k=-n)
    matrix[:n, :n] += np.eye(n) + step_size * h
    matrix[:n, n * tau :] += step_size * m
    return matrix


def roots(h: np.ndarray | float, m: np.ndarray | float, step_size: float, tau: int) -> np.ndarray:
    """Characteristic roots z, largest modulus first. h, m: (n, n) -> complex (n (tau + 1),)"""
    values = np.linalg.eigvals(companion(h, m, step_size, tau))
    return values[np.argsort(-np.abs(values), kind="stable")]


def spectral_radius(h: np.ndarray | float, m: np.ndarray | float, step_size: float, tau: int) -> float:
    """Largest |z|: the factor by which a disturbance grows per update in the long run. h, m: (n, n)"""
    return float(np.abs(roots(h, m, step_size, tau)[0]))


def without_null(h: np.ndarray | float, m: np.ndarray | float) -> tuple[np.ndarray, np.ndarray]:
    """H and M on the directions that either of them moves or reads. (r, r) each

    A softmax does not see a constant added to a state's logits: such directions have the root z = 1 at every step size
    and would hide whether the others are stable. (0, 0) where H = M = 0.
    """
    h, m = _square(h, m)
    u, singular, _ = np.linalg.svd(np.hstack([h, h.T, m, m.T]), full_matrices=False)
    basis = u[:, singular > NULL * max(singular[0], 1e-300)]
    return basis.T @ h @ basis, basis.T @ m @ basis


def critical_step_size(h: np.ndarray | float, m: np.ndarray | float, tau: int) -> float:
    """Step size eta > 0 at which the loop first loses stability: smallest with spectral radius 1. (n, n)

    By root finding on the spectral radius, directions that nothing moves left out. 0 where even the smallest step is
    unstable (H + M has an eigenvalue of positive real part); inf where no step up to 1e3 / (|H| + |M|) is.
    """
    h, m = without_null(h, m)
    size = np.linalg.norm(h, 2) + np.linalg.norm(m, 2) if len(h) else 0.0
    if size == 0:
        return math.inf

    def excess(step_size: float) -> float:
        return spectral_radius(h, m, step_size, tau) - 1

    grid = np.geomspace(1e-4, 1e3, GRID) / size
    if excess(grid[0]) >= 0:
        return 0.0
    for below, above in itertools.pairwise(grid):
        if excess(above) >= 0:
            return float(brentq(excess, below, above, xtol=1e-15 * above, rtol=1e-14))  # type: ignore[arg-type]
    return math.inf


def critical_tau(h: np.ndarray | float, m: np.ndarray | float, step_size: float, most: int = 256) -> float:
    """Largest lag up to which all lags are stable at this step; -1 where lag 0 is not, inf beyond `most`. (n, n)"""
    h, m = without_null(h, m)
    for tau in range(most + 1):
        if len(h) and spectral_radius(h, m, step_size, tau) >= 1:
            return tau - 1.0
    return math.inf


def recursion(
    h: np.ndarray | float,
    m: np.ndarray | float,
    constant: np.ndarray | float,
    step_size: float,
    tau: int,
    start: np.ndarray | float,
    steps: int,
) -> np.ndarray:
    """theta_0 .. theta_steps of the recursion itself, theta_k = `start` for k <= 0. (steps + 1, n)

    Raises BadInput for steps < 0 or tau < 0.
    """
    h, m = _square(h, m)
    for name, value in (("steps", steps), ("tau", tau)):
        if value < 0:
            raise BadInput(f"{name} is {value}, expected at least 0")
    theta = np.empty((steps + tau + 1, len(h)))
    theta[: tau + 1] = np.atleast_1d(start)
    for k in range(tau, steps + tau):
        theta[k + 1] = theta[k] + step_size * (h @ theta[k] + m @ theta[k - tau] + constant)
    return theta[tau:]


def _square(h: np.ndarray | float, m: np.ndarray | float) -> tuple[np.ndarray, np.ndarray]:
    h, m = np.atleast_2d(np.asarray(h, dtype=float)), np.atleast_2d(np.asarray(m, dtype=float))
    if h.ndim != 2 or h.shape[0] != h.shape[1] or h.shape != m.shape:
        raise BadInput(f"H has shape {h.shape} and M {m.shape}, expected the same (n, n)")
    if not (np.isfinite(h).all() and np.isfinite(m).all()):
        raise BadInput("H or M has an entry that is not finite")
    return h, m
