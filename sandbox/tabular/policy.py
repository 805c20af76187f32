"""Tabular softmax policies: logits (S, V), log-probabilities, the three policies of the theory, drawing from one.

`Policies` holds the log-probability tables of who is who (THEORY section 1): `train` pi, `sync` mu, `rollout` q.
Leading axes, one entry per run, are allowed everywhere.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from sandbox.arrays import log_softmax
from sandbox.errors import BadInput
from sandbox.tabular.problems import END, Case, Problem


class Policies(NamedTuple):
    """Log-probabilities of every token in every state, nats. (..., S, V) each

    train: pi, the trainer now. sync: mu, the trainer's engine at the sampler's weights. rollout: q, what draws.
    """

    train: np.ndarray
    sync: np.ndarray
    rollout: np.ndarray


def log_policy(logits: np.ndarray) -> np.ndarray:
    """log softmax over the tokens of each state. (..., S, V)"""
    return log_softmax(logits)


def policies(logits: np.ndarray, sampler_logits: np.ndarray, log_offset: np.ndarray | float = 0.0) -> Policies:
    """pi, mu and q from the trainer's weights, the sampler's weights and the offset of the sampler's engine.

    q is proportional to mu exp(offset), so d = log mu - log q is minus the offset up to a constant per state.

    Args:
        logits: theta, what the trainer holds. (..., S, V)
        sampler_logits: theta', what the sampler loaded at its last sync. (..., S, V)
        log_offset: added to log mu before renormalising; 0 for an exact sampler. (..., S, V)
    """
    sync = log_policy(sampler_logits)
    # Without an offset q is mu to the last bit, so that an exact sampler has discrepancy exactly 0.
    rollout = log_policy(sync + log_offset) if np.any(log_offset) else sync
    return Policies(log_policy(logits), sync, rollout)


@dataclass(frozen=True)
class ConstantOffset:
    """Log-offset fixed for the whole run: independent normals of standard deviation `sd` nats; 0 = exact sampler."""

    sd: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.sd < np.inf:
            raise BadInput(f"sd is {self.sd}, expected a finite number >= 0")

    def __call__(self, rng: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
        """Offset of each (state, token), nats. (S, V)"""
        return self.sd * rng.normal(size=shape)


@dataclass(frozen=True, eq=False)
class GivenOffset:
    """The same log-offset table in every run; a number adds nothing, as the sampler renormalises.

    Args:
        log_offset: nats. (S, V), or 0.0 for an exact sampler
    """

    log_offset: np.ndarray | float = 0.0

    def __call__(self, rng: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
        """The table. (S, V)"""
        return np.broadcast_to(self.log_offset, shape).astype(float)


def policies_of(case: Case) -> Policies:
    """pi, mu and q of a case. (S, V) each"""
    return policies(case.logits, case.sampler_logits, case.sampler_log_offset)


def draw(problem: Problem, log_rollout: np.ndarray, uniform: np.ndarray) -> np.ndarray:
    """Responses drawn by inverting the cumulative distribution, as flat indices s V + a; -1 after the end.

    Args:
        log_rollout: log q of each run. (R, S, V)
        uniform: uniform numbers in [0, 1), one per token. (R, N, T)
    Returns: int (R, N, T)
    """
    runs, responses, horizon = uniform.shape
    vocabulary = problem.shape[1]
    below = np.cumsum(np.exp(log_rollout), axis=-1)[
        ..., :-1
    ]  # without the last entry, which rounding may leave below 1
    run = np.arange(runs)[:, None]
    state = np.full((runs, responses), problem.initial)
    pairs = np.full((runs, responses, horizon), END)
    for t in range(horizon):
        alive = state != END
        token = (uniform[..., t, None] >= below[run, state]).sum(axis=-1)
        pairs[..., t] = np.where(alive, state * vocabulary + token, END)
        state = np.where(alive, problem.transition[state, token], END)
        if not alive.any():
            break
    return pairs
