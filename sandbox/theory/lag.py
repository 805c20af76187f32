"""Lag as a feedback loop between two syncs: its gain, its growth, and the linear update that a correction leaves.

With x = theta - theta' the uncorrected stale update is g0 + H x + O(x^2), the true gradient g0 + (H + M) x, so the bias
left by the lag is -M x and it enters the next update (THEORY section 5):
    x_{k+1} = x_k + eta (g_true(x_k) - M x_k + b_d).
The loop gain is the spectrum of -eta M: positive feeds the lag, negative damps it, and both occur. Exact importance
weighting replaces -M x by 0. A constant discrepancy adds b_d and no loop. Matrices come as functions x -> M x on (S, V)
tables or as dense (S V, S V) arrays; the advantage of the update is divided by the sampler's scale, as everywhere.
How to train is a `SimConfig`, the same that `simulate.run` takes; its batch size and seed do not matter here.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import polars as pl

from sandbox.corrections import CORRECTIONS
from sandbox.errors import BadInput
from sandbox.tabular import exact, matrices
from sandbox.tabular.exact import Advantage
from sandbox.tabular.policy import GivenOffset, Policies, log_policy, policies
from sandbox.tabular.problems import Problem
from sandbox.tabular.simulate import SimConfig

Product = Callable[[np.ndarray], np.ndarray]  # x -> matrix times x, (S, V) -> (S, V)
DIFFERENCE = 1e-5  # step of central differences, relative to the largest entry of x


def product(matrix: np.ndarray) -> Product:
    """x -> matrix x for a dense (S V, S V) matrix."""
    return lambda x: (matrix @ x.ravel()).reshape(x.shape)


def feedback(problem: Problem, logp: np.ndarray, x: np.ndarray, advantage: Advantage = "normalised") -> np.ndarray:
    """H x: what a lag x of the trainer's logits adds, to first order, to the uncorrected update. (S, V) -> (S, V)

    H = E[A hess log pi] = -sum_s occ(s) Aocc(s) F(s) (THEORY section 5): it feeds the lag in states of negative mean
    advantage and damps it elsewhere.
    """
    return matrices.h_product(problem, logp, x) / exact.advantage_scale(problem, logp, advantage)


def left_out(problem: Problem, logp: np.ndarray, x: np.ndarray, advantage: Advantage = "normalised") -> np.ndarray:
    """M x: what the uncorrected update misses of the gradient at lag x, first order; logp nats. (S, V) -> (S, V)"""
    return matrices.m_product(problem, logp, x) / exact.advantage_scale(problem, logp, advantage)


def offset_of(cfg: SimConfig) -> np.ndarray | float:
    """The offset of the sampler's engine under `cfg`, nats: (S, V), or 0.0 for an exact sampler.

    Raises BadInput where every run draws its own: what is computed here is one path, so give a `GivenOffset`.
    """
    if isinstance(cfg.discrepancy, GivenOffset):
        return cfg.discrepancy.log_offset
    if cfg.discrepancy.sd:
        raise BadInput(f"discrepancy is drawn by every run (sd {cfg.discrepancy.sd}), expected a GivenOffset")
    return 0.0


def mean_update(problem: Problem, now: Policies, cfg: SimConfig) -> np.ndarray:
    """The expected update of the trainer's logits under `cfg`, its penalty included; times the step size. (S, V)"""
    update = exact.expected_update(problem, now, cfg.correction, cfg.advantage)
    return cfg.step_size * (update - cfg.penalty * exact.kl_gradient(problem, now.train) if cfg.penalty else update)


def applied_feedback(problem: Problem, logits: np.ndarray, x: np.ndarray, cfg: SimConfig) -> np.ndarray:
    """J x: what a lag x adds, to first order, to the update that is really applied. (S, V) -> (S, V)

    H x for the uncorrected update, (H + M) x for exact sequence weights, and for token weights H x plus the part of M
    whose two scores meet at one token. Central differences of the exact expected update around lag 0.

    Args:
        logits: of the sampler, where the lag is 0. (S, V)
    """
    h = DIFFERENCE / max(np.abs(x).max(), 1e-300)
    ahead, behind = (
        mean_update(problem, policies(logits + sign * h * x, logits, offset_of(cfg)), cfg) for sign in (1, -1)
    )
    return (ahead - behind) / (2 * h * cfg.step_size)


def loop_gain(m: np.ndarray, step_size: float) -> np.ndarray:
    """Eigenvalues of -eta M, largest first: what one update adds to each mode of the lag, per unit of it. (n,)

    M is symmetric up to rounding, so they are real.
    """
    return np.sort(np.linalg.eigvalsh(-step_size * (m + m.T) / 2))[::-1]


def path(problem: Problem, logits: np.ndarray, cfg: SimConfig) -> np.ndarray:
    """The lag x_0 = 0 .. x_steps of the exact mean-field recursion, never synced. (steps + 1, S, V)"""
    x = np.zeros((cfg.steps + 1, *problem.shape))
    for k in range(cfg.steps):
        x[k + 1] = x[k] + mean_update(problem, policies(logits + x[k], logits, offset_of(cfg)), cfg)
    return x


def predicted_path(problem: Problem, logits: np.ndarray, missed: Product, cfg: SimConfig) -> np.ndarray:
    """x_{k+1} = x_k + eta (g_true(x_k) - M x_k + b_d) for the uncorrected update, whatever `cfg` corrects.

    g_true is the exact gradient at theta' + x, so the only thing linearised is the bias that lag leaves.

    Args:
        missed: x -> M x, divided by the scale of the advantage, at the sampler's weights.
    Returns: (steps + 1, S, V)
    """
    start = policies(logits, logits, offset_of(cfg))
    scale = exact.advantage_scale(problem, start.rollout, cfg.advantage)
    none = CORRECTIONS["none"]
    bias = exact.expected_update(problem, start, none, cfg.advantage) - exact.gradient(problem, start.train) / scale
    x = np.zeros((cfg.steps + 1, *problem.shape))
    for k in range(cfg.steps):
        true = exact.gradient(problem, log_policy(logits + x[k])) / scale
        x[k + 1] = x[k] + cfg.step_size * (true - missed(x[k]) + bias)
    return x


@dataclass(frozen=True)
class LoopEffect:
    """The uncorrected run against the exactly corrected one, same start: what the loop itself does to the lag.

    table: k, lag_none, lag_exact (Euclidean norms), predicted (of `predicted_path`), excess = lag_none - lag_exact.
    feeds: whether the excess is positive at the end.
    """

    table: pl.DataFrame
    feeds: bool


def loop_effect(problem: Problem, logits: np.ndarray, missed: Product, cfg: SimConfig) -> LoopEffect:
    """Lag growth predicted against measured, beside the exactly corrected run from the same start. logits (S, V)"""
    none, weighted = (path(problem, logits, replace(cfg, correction=CORRECTIONS[c])) for c in ("none", "seq_is"))
    predicted = predicted_path(problem, logits, missed, cfg)
    size = {
        name: np.linalg.norm(x.reshape(len(x), -1), axis=1)[1:]
        for name, x in (("lag_none", none), ("lag_exact", weighted), ("predicted", predicted))
    }
    table = pl.DataFrame({"k": np.arange(1, len(none)), **size, "excess": size["lag_none"] - size["lag_exact"]})
    return LoopEffect(table, bool(table["excess"][-1] > 0))
