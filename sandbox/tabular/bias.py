"""Which part of a stale, discrepant update is wrong: its bias in four parts, THEORY section 4, each by recursion.

The sampler draws from q with log mu - log q = d, E_mu[d | s] = 0; the trainer's engine says mu. To first order in d the
uncorrected update minus the gradient is E_mu[(-sum_u d_u) A sum_t score_t], A = R - E_mu[R]. By which token's d meets
which token's score, with Abar_t = E_mu[A | what came before token t]:

    leading        E_mu sum_t (-d_t) Abar_t score_t         tokens drawn too often, at their prefix's mean advantage
    within_token   E_mu sum_t (-d_t) (A - Abar_t) score_t   the same, at what the token itself is worth beyond that
    prefix         E_mu sum_t (-sum_{u<t} d_u) A score_t    prefixes visited with the wrong frequency
    downstream     E_mu sum_t (-sum_{u>t} d_u) A score_t    the value of acting as q afterwards

A lag splits in the same way: with an exact sampler and pi = softmax(log mu + x) the first-order bias of the uncorrected
update against the gradient AT PI has these parts with the centred x in place of d (it is -M x, see `matrices.py`).
The parts are vectors and can cancel.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import polars as pl

from sandbox.errors import BadInput
from sandbox.tabular.exact import advantage_visits_of, centred
from sandbox.tabular.problems import Problem
from sandbox.tabular.recursions import ahead, meeting, past_moments, small, values

PARTS = ("leading", "within_token", "prefix", "downstream")
_AFTER_TOKEN = ("prefix", "downstream")
# What a correction does not remove, to first order: caps, bands and clips do not bind on small ratios, so that every
# token weight is pi/q there. Corrections that weigh by the lag alone leave the discrepancy to their centring.
DISCREPANCY_LEFT: dict[str, tuple[str, ...]] = {
    "none": PARTS,
    **dict.fromkeys(("dlc", "seq_dlc"), PARTS[1:]),
    **dict.fromkeys(("tis", "mis", "icepop", "ppo", "cis"), _AFTER_TOKEN),
    **dict.fromkeys(("seq_is", "seq_tis", "seq_mis"), ()),
}
LAG_LEFT: dict[str, tuple[str, ...]] = {
    "none": PARTS,
    **dict.fromkeys(("dlc", "tis", "mis", "icepop", "ppo", "cis"), _AFTER_TOKEN),
    **dict.fromkeys(("seq_is", "seq_tis", "seq_mis", "seq_dlc"), ()),
}


class BiasSplit(NamedTuple):
    """First-order bias of the uncorrected update, (S, V) each; the fields are `PARTS`."""

    leading: np.ndarray
    within_token: np.ndarray
    prefix: np.ndarray
    downstream: np.ndarray

    @property
    def total(self) -> np.ndarray:
        """(S, V)"""
        return self.left(PARTS)

    def left(self, parts: Sequence[str]) -> np.ndarray:
        """Sum of the named parts, as in `DISCREPANCY_LEFT["dlc"]`. (S, V)"""
        return sum((getattr(self, part) for part in parts), np.zeros_like(self.leading))


def split(problem: Problem, logp: np.ndarray, log_ratio: np.ndarray) -> BiasSplit:
    """The four parts for a small token log ratio, trainer minus sampler, around the policy `logp`.

    Args:
        logp: mu. (S, V)
        log_ratio: d, or the lag x; its mean under mu in each state does not matter. (S, V)
    """
    mu, d = np.exp(logp), _centre(logp, log_ratio)
    return _split(problem, mu, d, *_recursions(problem, logp, d))


def by_horizon(problem: Problem, logp: np.ndarray, log_ratio: np.ndarray, horizons: Sequence[int]) -> pl.DataFrame:
    """The four parts of the same problem cut at each horizon: Euclidean norms, beside that of the gradient.

    In a machine what comes before t does not depend on T, and what comes after only on the steps left: both recursions
    are run once, for the largest T.

    Args:
        horizons: numbers of tokens T >= 1, such as range(1, 1025).
    Returns: a row a horizon: horizon, gradient, the four parts, total, and left_by_dlc, left_by_tis: norms of what
        those two leave of a discrepancy (seq_is leaves nothing).
    Raises BadInput: a horizon below 1, or none.
    """
    if not horizons or min(horizons) < 1:
        raise BadInput(f"horizons are {list(horizons)}, expected numbers >= 1")
    longest = replace(problem, horizon=max(horizons))
    mu, d = np.exp(logp), _centre(logp, log_ratio)
    before, after = _recursions(longest, logp, d)
    rows = []
    for horizon in horizons:
        cut = replace(problem, horizon=horizon)
        if small(longest):
            now = before[:, :horizon], after[:, longest.horizon - horizon :]
        else:  # what is after t was only worked out for states that can occur at t
            now = _recursions(cut, logp, d)
        parts = _split(cut, mu, d, *now)
        advantage = advantage_visits_of(cut, now[0][0], now[0][2], now[1][0])
        vectors = {"gradient": centred(mu * advantage, mu)} | parts._asdict() | {"total": parts.total}
        vectors |= {f"left_by_{name}": parts.left(DISCREPANCY_LEFT[name]) for name in ("dlc", "tis")}
        rows.append({"horizon": horizon} | {name: float(np.linalg.norm(x)) for name, x in vectors.items()})
    return pl.DataFrame(rows)


def _centre(logp: np.ndarray, log_ratio: np.ndarray) -> np.ndarray:
    """The log ratio less its mean in each state. (S, V)"""
    return log_ratio - (np.exp(logp) * log_ratio).sum(axis=-1, keepdims=True)


def _recursions(problem: Problem, logp: np.ndarray, d: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """What comes before and after a token.

    Returns:
        before: P(s_t = s), E[sum_{u<t} d_u; s_t = s], E[reward before t; s_t = s]. (3, T, S)
        after: E[R_t | s_t] and E[D_t R_t | s_t], R_t and D_t the sums of reward and of d from t on. (2, T + 1, S + 1)
    """
    push = np.exp(logp) * d
    visits, past = past_moments(problem, logp, 1, d)
    future = values(problem, logp, (np.exp(logp) * problem.reward).sum(axis=-1))
    # d has mean 0 at its prefix: it meets only what is earned with its token or later.
    gain = values(problem, logp, (push * problem.reward).sum(axis=-1) + ahead(problem, push, future))
    return np.stack([visits, past, past_moments(problem, logp, 1)[1]]), np.stack([future, gain])


def _split(problem: Problem, mu: np.ndarray, d: np.ndarray, before: np.ndarray, after: np.ndarray) -> BiasSplit:
    """Terms that do not depend on the token drop out in `centred`: a score has mean 0 at its prefix."""
    visits, past, past_reward = before
    future, gain = after
    advantage = advantage_visits_of(problem, visits, past_reward, future)
    leading = -(mu * advantage).sum(axis=-1, keepdims=True) * mu * d
    token = centred(-d * mu * advantage, mu)
    prefix = centred(-mu * (past.sum(axis=0)[:, None] * problem.reward + meeting(problem, past, future)), mu)
    downstream = centred(-mu * meeting(problem, visits, gain), mu)
    return BiasSplit(leading, token - leading, prefix, downstream)
