"""When does the sequence ESS collapse? The prediction of ess_step, THEORY section 6, at four levels.

    closed form    Var[log w]_k = a k^2 + b k,  a = eta^2 g0' F g0,  b = eta^2 tr(F Sigma) / N
    linearised     x_{k+1} = x_k + eta (u0 + J x_k),  Var[log w]_k = x_k' F x_k + b k; J is H where uncorrected
    mean field     iterate the expected update of any correction, read the ESS by the exact recursion
    fit            a and b from measured Var[log w] at k = 1 .. m (`collapse.py`), where F and Sigma are out of reach

k counts optimiser updates since the sync; ESS ~ exp(-Var[log w]) passes a threshold where Var >= ln(1 / threshold).
One update is logits += step_size * mean over N responses of sum_t weight A (e_a - c(.|s)), A the advantage of the whole
return: R - E[R] ("centred"), or that over sd(R) + 1e-6 ("normalised"). With the batch mean in place of E[R], as in
`simulate.py`, the expected update is (1 - 1/N) times the one here. "No collapse" is ess_step = inf, a legal prediction.
"""

import math
from typing import Any, NamedTuple

import numpy as np
import polars as pl

from sandbox.errors import BadInput, positive
from sandbox.tabular import exact
from sandbox.tabular.policy import draw, log_policy, policies
from sandbox.tabular.problems import Problem, table
from sandbox.tabular.simulate import SimConfig
from sandbox.theory import lag
from sandbox.theory.collapse import quadratic_step, var_threshold


class Prediction(NamedTuple):
    """a, b per step^2 and step; ess_step in optimiser updates since the sync, inf for none within the horizon."""

    a: float
    b: float
    ess_step: float


def fisher_form(logp: np.ndarray, visits: np.ndarray, x: np.ndarray) -> np.ndarray:
    """x' F x = sum_s occ(s) Var_{a ~ p(.|s)} x[s, a], F the Fisher information of whole responses. (..., S, V) -> (...)

    The variance of the sequence log ratio to first order in a change x of the logits; cross terms of two visits vanish.
    """
    p = np.exp(logp)
    centred = x - (p * x).sum(axis=-1, keepdims=True)
    return (visits * (p * centred**2).sum(axis=-1)).sum(axis=-1)


def trace_fisher_covariance(
    problem: Problem,
    logp: np.ndarray,
    advantage: exact.Advantage = "normalised",
    rng: np.random.Generator | None = None,
    responses: int = 4096,
) -> float:
    """tr(F Sigma), Sigma the covariance over on-policy responses of G = A sum_t (e_a - p(.|s)); = E[G' F G] - g0' F g0.

    Exact where no state repeats on a path (`problem.layered`): then the visits of one response do not interact and
    E[G' F G] = sum_t E[A^2 f(s_t, a_t)], f(s, a) = (e_a - p)' occ(s) F(s) (e_a - p). Else a mean over `responses`.

    Raises BadInput: states repeat and there is no `rng` to draw with, or responses < 1.
    """
    positive("responses", responses)
    visits, scale = exact.occupancy(problem, logp), exact.advantage_scale(problem, logp, advantage)
    drift = fisher_form(logp, visits, exact.gradient(problem, logp) / scale)
    if not problem.layered:
        if rng is None:
            raise BadInput("states repeat within a response: tr(F Sigma) needs an rng to be estimated with")
        return float(_sampled_form(rng, problem, logp, visits, responses) / scale**2 - drift)
    p = np.exp(logp)
    score = np.eye(problem.shape[1]) - p[:, None, :]  # (S, V, V): e_a - p(.|s)
    form = visits[:, None] * ((p[:, None] * score**2).sum(-1) - (p[:, None] * score).sum(-1) ** 2)
    baseline = float(exact.expectation(problem, logp, problem.reward))
    now, past, past_square = exact.past_moments(problem, logp, 2)[..., None]
    total = 0.0
    for t, s, mean, variance in exact.to_go(problem, logp, problem.reward):
        rest = mean - baseline
        square = past_square[t, s] + 2 * past[t, s] * rest + now[t, s] * (variance + rest**2)
        total += float((p[s] * form[s] * square).sum())
    return float(total / scale**2 - drift)


def _sampled_form(
    rng: np.random.Generator, problem: Problem, logp: np.ndarray, visits: np.ndarray, responses: int
) -> float:
    """E[G' F G] for the centred advantage, the mean over drawn responses."""
    states, vocabulary = problem.shape
    baseline = float(exact.expectation(problem, logp, problem.reward))
    total = 0.0
    for start in range(0, responses, 256):
        n = min(256, responses - start)
        pairs = draw(problem, logp[None], rng.random((1, n, problem.horizon)))[0]
        row, drawn = np.broadcast_to(np.arange(n)[:, None], pairs.shape)[pairs >= 0], pairs[pairs >= 0]
        count = np.bincount(row * states * vocabulary + drawn, minlength=n * states * vocabulary)
        count = count.reshape(n, states, vocabulary)
        gain = np.bincount(row, problem.reward.ravel()[drawn], minlength=n) - baseline
        score = count - np.exp(logp) * count.sum(axis=-1, keepdims=True)
        total += float((gain**2 * fisher_form(logp, visits, score)).sum())
    return total / responses


def closed_form(
    problem: Problem,
    logits: np.ndarray,
    step_size: float,
    n: int,
    advantage: exact.Advantage = "normalised",
    threshold: float = 0.5,
    rng: np.random.Generator | None = None,
    responses: int = 4096,
) -> Prediction:
    """Var[log w]_k = a k^2 + b k just after a sync, zero discrepancy, from drift and noise of the first update.

    Args:
        logits: weights at the sync. (S, V)
        n: responses per batch, N; inf leaves out the noise.
        rng, responses: how tr(F Sigma) is estimated where states repeat (`trace_fisher_covariance`).
    Raises BadInput: logits of another shape, a step size that is not finite and positive, n <= 0.
    """
    positive("step_size", step_size)
    if not n > 0:
        raise BadInput(f"n is {n}, expected a number of responses > 0")
    logp = log_policy(table("logits", logits, problem.shape))
    drift = exact.gradient(problem, logp) / exact.advantage_scale(problem, logp, advantage)
    a = step_size**2 * float(fisher_form(logp, exact.occupancy(problem, logp), drift))
    b = step_size**2 * trace_fisher_covariance(problem, logp, advantage, rng, responses) / n
    return Prediction(a, b, quadratic_step(a, b, threshold))


def linearised(
    problem: Problem, logits: np.ndarray, cfg: SimConfig, noise: float, threshold: float = 0.5
) -> tuple[np.ndarray, float]:
    """Var[log w] after k = 1 .. steps updates to first order in the lag x, and its ess_step.

    x_{k+1} = x_k + eta (u0 + J x_k), u0 the update at lag 0 and J x what the lag adds to the update that is really
    applied (`lag.applied_feedback`): H x uncorrected, so an open loop; a corrected run closes it. A cap that binds only
    at larger lag is not in it; the mean field has it.

    Args:
        cfg: its correction must be one whose expected update is a recursion. Var[log w] is that of the lag, under mu.
        noise: b of the closed form.
    Returns: (steps,), and the first k with Var >= ln(1 / threshold), inf for none.
    Raises BadInput: noise < 0, a threshold outside (0, 1), a discrepancy that every run draws.
    """
    if not noise >= 0:
        raise BadInput(f"noise is {noise}, expected a number >= 0")
    start = policies(logits, logits, lag.offset_of(cfg))
    visits, drift = exact.occupancy(problem, start.sync), lag.mean_update(problem, start, cfg)
    x, curve = np.zeros(problem.shape), np.empty(cfg.steps)
    for k in range(cfg.steps):
        x = x + drift + (cfg.step_size * lag.applied_feedback(problem, logits, x, cfg) if k else 0.0)
        curve[k] = fisher_form(start.sync, visits, x) + noise * (k + 1)
    above = np.flatnonzero(curve >= var_threshold(threshold))
    return curve, float(above[0] + 1) if len(above) else math.inf


class MeanField(NamedTuple):
    """Training on the expected update, without sampling noise.

    table: one row an update: step, since_sync, return, return_sampler, ess, var_log_ratio, token_kl, synced.
    ess_step: `since_sync` of the first row with ess < threshold; inf where there is none.
    logits: the trainer's at the end. (S, V)
    """

    table: pl.DataFrame
    ess_step: float
    logits: np.ndarray


def mean_field(problem: Problem, logits: np.ndarray, cfg: SimConfig, threshold: float = 0.5) -> MeanField:
    """Iterate logits += step_size * expected update; after each, the state of trainer and sampler before any sync.

    `ess` and `var_log_ratio` are those of the lag, pi against mu. The resync rule sees what a batch would show it:
    (E_q r)^2 / E_q r^2 before the update, with standard error 0; the sampler syncs after the update.

    Args:
        logits: start of trainer and sampler. (S, V)
        cfg: as for `simulate.run`; batch size and seed do not matter.
    Raises BadInput: a threshold outside (0, 1), a discrepancy that every run draws, a correction whose expected update
    is no recursion (truncated sequences, PPO) on a problem of more than about a million sequences.
    """
    var_threshold(threshold)  # refuses one outside (0, 1)
    offset, since_sync = lag.offset_of(cfg), 0
    trainer = sampler = np.array(logits, dtype=float)
    now = policies(trainer, sampler, offset)
    rows: list[dict[str, Any]] = []
    for step in range(1, cfg.steps + 1):
        batch_ess = float(exact.lag_ess_under_sampler(problem, now))
        trainer = trainer + lag.mean_update(problem, now, cfg)
        since_sync += 1
        now = policies(trainer, sampler, offset)
        synced = cfg.resync(since_sync, batch_ess, 0.0)
        rows.append(
            {
                "step": step,
                "since_sync": since_sync,
                "return": float(exact.expectation(problem, now.train, problem.reward)),
                "return_sampler": float(exact.expectation(problem, now.rollout, problem.reward)),
                "ess": float(exact.ess(problem, now.train, now.sync)),
                "var_log_ratio": float(exact.variance_log_ratio(problem, now.train, now.sync)),
                "token_kl": float(exact.token_kl(problem, now.train, now.rollout)),
                "synced": synced,
            }
        )
        if synced:
            sampler, since_sync = trainer, 0
            now = policies(trainer, sampler, offset)
    table = pl.DataFrame(rows)
    below = table.filter(pl.col("ess") < threshold)["since_sync"]
    return MeanField(table, float(below[0]) if len(below) else math.inf, trainer)
