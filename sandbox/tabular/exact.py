"""Exact quantities of a tabular problem, by the recursions of `recursions.py`, not by enumeration of V^T sequences.

A log-sum over sequences gives E_q[w^2], hence D2 and the sequence ESS; expectations give returns, KL and lengths; what
comes before a token (forward) and after it (backward) gives the gradient and the expected updates.
THEORY sections 2 and 3. All inputs are log-probability tables (..., S, V); leading axes are runs. Units: nats.
"""

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from sandbox.arrays import masked
from sandbox.batch import Batch
from sandbox.corrections import CORRECTIONS, Correction
from sandbox.errors import BadInput
from sandbox.tabular import enumeration
from sandbox.tabular.policy import Policies
from sandbox.tabular.problems import Problem
from sandbox.tabular.recursions import expectation, log_sum, meeting, past_moments, values

Advantage = Literal["centred", "normalised"]
ADVANTAGES = ("centred", "normalised")
ADVANTAGE_EPS = 1e-6  # added to the standard deviation of the return, as group-normalising trainers do


class ToGo(NamedTuple):
    """What sum_{u >= t} f(s_u, a_u) is worth given (s_t, a_t), for the states that can occur at t."""

    t: int
    states: slice | np.ndarray  # (n,)
    mean: np.ndarray  # (..., n, V)
    variance: np.ndarray  # (..., n, V)


def to_go(problem: Problem, logq: np.ndarray, f: np.ndarray) -> Iterator[ToGo]:
    """Mean and variance under q of what is still to come, from t = T-1 down to 0. (S, V) -> (S,) each

    The variance is the sum of conditional variances, so it never is a difference of large numbers. That is why there
    is no second route by the matrix of a step: a square around the mean of its own state does not sum over tokens
    ahead of time, unless as E[x^2] - E[x]^2.
    """
    q = np.exp(logq)
    value = np.zeros((2, *np.broadcast_shapes(q.shape, f.shape)[:-2], problem.shape[0] + 1))
    for t, states in reversed(list(enumerate(problem.layers))):
        mean, variance = value[..., problem.transition[states]]
        mean = f[..., states, :] + mean
        value[..., states] = _mix(q[..., states, :], mean, variance)
        yield ToGo(t, states, mean, variance)


def _mix(q: np.ndarray, mean: np.ndarray, variance: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean and variance over the token, by the law of total variance. (..., V) -> (...) each"""
    centre = (q * mean).sum(axis=-1)
    return centre, (q * (variance + (mean - centre[..., None]) ** 2)).sum(axis=-1)


def variance(problem: Problem, logq: np.ndarray, f: np.ndarray) -> np.ndarray:
    """Var_q[sum_t f(s_t, a_t)]. (..., S, V) -> (...)"""
    first = deque(to_go(problem, logq, f), maxlen=1).pop()  # t = 0
    q = np.exp(logq[..., problem.initial, :])
    return _mix(q, first.mean[..., 0, :], first.variance[..., 0, :])[1]


def renyi2(problem: Problem, logp: np.ndarray, logq: np.ndarray) -> np.ndarray:
    """Order-2 Renyi divergence D2(p || q) = log E_q[(p/q)^2] of whole sequences. (..., S, V) -> (...)"""
    return log_sum(problem, 2 * logp - logq)


def ess(problem: Problem, logp: np.ndarray, logq: np.ndarray) -> np.ndarray:
    """Population sequence ESS of weights p/q on responses of q: exp(-D2(p || q)). (..., S, V) -> (...)"""
    return np.exp(-renyi2(problem, logp, logq))


def lag_ess_under_sampler(problem: Problem, policies: Policies) -> np.ndarray:
    """(E_q r)^2 / E_q r^2 with r = pi/mu: what a batch drawn from q estimates, and the resync rule sees. -> (...)"""
    lag = policies.train - policies.sync
    once, twice = log_sum(problem, np.stack([policies.rollout + lag, policies.rollout + 2 * lag]))
    return np.exp(2 * once - twice)


def variance_log_ratio(problem: Problem, logp: np.ndarray, logq: np.ndarray) -> np.ndarray:
    """Var_q[log w] of the sequence log ratio, w = p/q. nats^2. (..., S, V) -> (...)"""
    return variance(problem, logq, logp - logq)


def kl(problem: Problem, logp: np.ndarray, logq: np.ndarray) -> np.ndarray:
    """KL(p || q) of whole sequences. (..., S, V) -> (...)"""
    return expectation(problem, logp, logp - logq)


def token_kl(problem: Problem, logp: np.ndarray, logq: np.ndarray) -> np.ndarray:
    """KL(q || p) per token on the prefixes of q. (..., S, V) -> (...)

    Mean over the sampler's tokens of the KL at their prefix: by the chain rule the whole-sequence KL over the length.
    """
    total, length = expectation(problem, logq, np.stack(np.broadcast_arrays(logq - logp, 1.0)))
    return total / length


def occupancy(problem: Problem, logq: np.ndarray) -> np.ndarray:
    """Expected visits of each state in one response of q. (S, V) -> (S,)"""
    return past_moments(problem, logq, 0)[0].sum(axis=0)


def advantage_visits(problem: Problem, logq: np.ndarray) -> np.ndarray:
    """sum_t P_q(s_t = s) (E_q[R | s_t = s, a_t = a] - E_q[R]), R the whole return, rewards before t included. (S, V)"""
    visits, past = past_moments(problem, logq, 1)
    future = values(problem, logq, (np.exp(logq) * problem.reward).sum(axis=-1))
    return advantage_visits_of(problem, visits, past, future)


def advantage_visits_of(problem: Problem, visits: np.ndarray, past: np.ndarray, future: np.ndarray) -> np.ndarray:
    """`advantage_visits` from P(s_t = s), E[reward before t; s_t = s], (T, S) each, and the values, (T + 1, S + 1)."""
    baseline = future[0, problem.initial]
    at_once = past.sum(axis=0)[:, None] + visits.sum(axis=0)[:, None] * (problem.reward - baseline)
    return at_once + meeting(problem, visits, future)


def advantage_scale(problem: Problem, logq: np.ndarray, advantage: Advantage) -> float:
    """What the centred advantage is divided by: 1, or sd_q(R) + 1e-6 where it is "normalised". (S, V)

    Raises BadInput for another advantage.
    """
    if advantage not in ADVANTAGES:
        raise BadInput(f"advantage is {advantage!r}, expected one of {', '.join(ADVANTAGES)}")
    if advantage == "centred":
        return 1.0
    return float(np.sqrt(variance(problem, logq, problem.reward))) + ADVANTAGE_EPS


class TokenWeights(NamedTuple):
    """What a correction that factors over tokens does to (state, token): weight, 0 where rejected, and the centring
    distribution c(.|s) of the score e_a - c(.|s). (..., S, V) each"""

    weight: np.ndarray
    centre: np.ndarray


def token_weights(policies: Policies, correction: Correction) -> TokenWeights:
    """The correction's own code, asked about every state and token.

    Raises BadInput where the weight does not factor over tokens.
    """
    if not correction.factors:
        raise BadInput(
            f"correction {name_of(correction)} weighs whole responses or looks at the advantage: not per token"
        )
    shape = policies.train.shape
    train, sync, rollout = (np.broadcast_to(p, shape).reshape(-1, shape[-1]) for p in policies)
    # One "response" per state, one "token" per entry of the vocabulary; mask and *_all broadcast over the tokens.
    ones = np.ones((len(train), 1))
    batch = Batch(train, rollout, ones > 0, ones, sync, None, train[:, None], sync[:, None], rollout[:, None])
    weight, keep, centre = correction(batch)
    centre = np.exp(train) + (centre if isinstance(centre, int | float) else centre[:, 0])
    return TokenWeights(masked(weight, keep).reshape(shape), centre.reshape(shape))


def name_of(correction: Correction) -> str:
    """Name of a preset, or the correction written out."""
    return next((name for name, preset in CORRECTIONS.items() if preset == correction), repr(correction))


def gradient(problem: Problem, logp: np.ndarray) -> np.ndarray:
    """Gradient of the return E_p[R] with respect to the logits of p. (S, V) -> (S, V)"""
    return centred(advantage_visits(problem, logp) * np.exp(logp), np.exp(logp))


def kl_gradient(problem: Problem, logp: np.ndarray) -> np.ndarray:
    """Gradient of KL(p || uniform) of whole sequences with respect to the logits of p. (S, V) -> (S, V)

    The gradient of E_p[sum_t f(s_t, a_t)], f = log p - log(1/V): that of f itself has mean 0 at its prefix.
    """
    p, f = np.exp(logp), logp + np.log(problem.shape[1])
    visits = past_moments(problem, logp, 0)[0]
    future = values(problem, logp, (p * f).sum(axis=-1))
    return centred(p * (visits.sum(axis=0)[:, None] * f + meeting(problem, visits, future)), p)


def centred(mass: np.ndarray, centre: np.ndarray) -> np.ndarray:
    """sum_a mass(s, a) (e_a - c(.|s)). (..., S, V)"""
    return mass - centre * mass.sum(axis=-1, keepdims=True)


def expected_update(
    problem: Problem, policies: Policies, correction: Correction, advantage: Advantage = "centred"
) -> np.ndarray:
    """Expected update of the trainer's logits by a batch of the sampler, THEORY section 3. (S, V)

    u[s,:] = sum_t P_q(s_t=s) sum_a q(a|s) w(s,a) (E_q[R | s_t=s, a_t=a] - b) (e_a - c(.|s)), b = E_q[R]: the mean over
    responses of the sum over tokens of weight, whole-return advantage and score. The normalised advantage is divided
    by sd_q(R) + 1e-6. Untruncated sequence weights give the exact gradient at the trainer's logits.

    A weight that does not factor over tokens (truncated sequences, PPO) is expected over all sequences, one by one.

    Raises BadInput: such a weight, and more than about a million sequences; their number is in the message.
    """
    return expected_updates(problem, policies, {"": correction}, advantage)[""]


def expected_updates(
    problem: Problem, policies: Policies, corrections: Mapping[str, Correction], advantage: Advantage = "centred"
) -> dict[str, np.ndarray]:
    """`expected_update` of several corrections for the price of one recursion. (S, V) each; BadInput as there."""
    scale = advantage_scale(problem, policies.rollout, advantage)
    q = np.exp(policies.rollout)
    visits = None
    updates = {}
    for name, correction in corrections.items():
        if correction == CORRECTIONS["seq_is"]:
            updates[name] = gradient(problem, policies.train) / scale
            continue
        if not correction.factors:
            baseline = float(expectation(problem, policies.rollout, problem.reward))
            try:
                updates[name] = enumeration.expected_update(problem, policies, correction, baseline, scale)
            except BadInput as error:
                raise BadInput(f"correction {name_of(correction)} has no recursion, and {error}") from error
            continue
        weight, centre = token_weights(policies, correction)
        visits = advantage_visits(problem, policies.rollout) if visits is None else visits
        updates[name] = centred(visits * q * weight, centre) / scale
    return updates


EXACT_CORRECTIONS = ("none", "tis", "mis", "icepop", "cis", "dlc", "seq_is")


@dataclass(frozen=True, eq=False)
class Report:
    """Every exact quantity of one problem and its three policies; `Policies` says which is which. Units: nats."""

    return_train: float
    return_sampler: float
    ess: dict[str, float]  # sequence level: lag, discrepancy, total = exp(-D2); lag_under_sampler
    renyi2: dict[str, float]  # lag, discrepancy, total
    kl_train_sampler: float  # KL(pi || q), whole sequence
    kl_sampler_train: float
    token_kl_on_sampler_prefixes: float  # KL(q || pi) per token of the sampler
    occupancy_sampler: np.ndarray  # (S,)
    gradient: np.ndarray  # of the trainer's return, (S, V)
    expected_update: dict[str, np.ndarray]  # correction: (S, V)
    bias: dict[str, np.ndarray]  # correction: update minus gradient (over the same scale), (S, V)


def report(problem: Problem, policies: Policies, advantage: Advantage = "centred") -> Report:
    """All of `Report` for one set of policies, (S, V) each."""
    train, sync, rollout = policies
    pairs = {"lag": (train, sync), "discrepancy": (sync, rollout), "total": (train, rollout)}
    d2 = {name: float(renyi2(problem, p, q)) for name, (p, q) in pairs.items()}
    updates = expected_updates(problem, policies, {c: CORRECTIONS[c] for c in EXACT_CORRECTIONS}, advantage)
    ess_of = {name: float(np.exp(-value)) for name, value in d2.items()}
    return Report(
        return_train=float(expectation(problem, train, problem.reward)),
        return_sampler=float(expectation(problem, rollout, problem.reward)),
        ess=ess_of | {"lag_under_sampler": float(lag_ess_under_sampler(problem, policies))},
        renyi2=d2,
        kl_train_sampler=float(kl(problem, train, rollout)),
        kl_sampler_train=float(kl(problem, rollout, train)),
        token_kl_on_sampler_prefixes=float(token_kl(problem, train, rollout)),
        occupancy_sampler=occupancy(problem, rollout),
        gradient=gradient(problem, train),
        expected_update=updates,
        bias={name: update - updates["seq_is"] for name, update in updates.items()},
    )
