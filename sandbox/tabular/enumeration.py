"""Expected update over all sequences, one by one, for weights that are no product of tokens (sequence weights, PPO)."""

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from sandbox.batch import Batch
from sandbox.corrections import Correction
from sandbox.errors import BadInput
from sandbox.tabular.policy import Policies
from sandbox.tabular.problems import END, Problem
from sandbox.tabular.recursions import log_sum_plain

MOST = 2**20  # sequences
CHUNK = 2**22  # numbers per table at a time


def count(problem: Problem) -> float:
    """Number of sequences; inf where it is beyond any float."""
    with np.errstate(over="ignore"):
        return float(np.exp(log_sum_plain(problem, np.zeros(problem.shape))))


def sequences(problem: Problem) -> np.ndarray:
    """Every sequence as flat indices s V + a of its tokens, -1 after the end. int (N, T)

    Raises BadInput: with the number, where there are more than `MOST`.
    """
    n = count(problem)
    if n > 1.001 * MOST:  # `count` rounds
        raise BadInput(f"there are {n:.3g} sequences, too many to enumerate: at most {MOST}")
    vocabulary = problem.shape[1]
    state, pairs = np.array([problem.initial]), np.empty((1, 0), dtype=int)
    for _ in range(problem.horizon):
        alive = state != END
        first = np.where(alive, state * vocabulary, END)
        # A sequence that goes on branches over the vocabulary; one that has ended stays one.
        token = np.where(alive[:, None], first[:, None] + np.arange(vocabulary), END)
        kept = np.where(alive[:, None], True, np.arange(vocabulary) == 0)
        parent = np.broadcast_to(np.arange(len(state))[:, None], token.shape)[kept]
        last = token[kept]
        pairs = np.concatenate([pairs[parent], last[:, None]], axis=1)
        state = np.where(last == END, END, problem.transition.ravel()[last])
    return pairs


class Pulls(NamedTuple):
    """What each sequence adds to the update: sum_t gain_t (e_a - pi - shift_t) at the states of its tokens.

    probability: of the sequence under q. (N,)
    pairs: its tokens as s V + a, -1 after the end. int (N, T)
    gain: weight times advantage, 0 where rejected. (N, T)
    shift: c - pi of the centred score, or 0.0. (N, T, V)
    """

    probability: np.ndarray
    pairs: np.ndarray
    gain: np.ndarray
    shift: np.ndarray | float


def pulls(
    problem: Problem, policies: Policies, correction: Correction, baseline: float, scale: float
) -> Iterator[Pulls]:
    """Every sequence with A = (R - baseline) / scale, the correction's own code asked; in chunks.

    Raises BadInput: with the number of sequences, where there are too many.
    """
    every = sequences(problem)
    vocabulary = problem.shape[1]
    each = max(1, CHUNK // (problem.horizon * (vocabulary if correction.centres else 1)))
    for start in range(0, len(every), each):
        pairs = every[start : start + each]
        mask, row = pairs >= 0, np.maximum(pairs, 0) // vocabulary
        train, sync, rollout, reward = (
            np.where(mask, x.ravel()[pairs], 0.0) for x in (*policies, np.asarray(problem.reward))
        )
        advantage = (reward.sum(axis=1, keepdims=True) - baseline) / scale
        batch = Batch(train, rollout, mask, advantage, sync)
        if correction.centres:
            pi, mu, q = (p[row] for p in policies)
            batch = replace(batch, logp_train_all=pi, logp_sync_all=mu, logp_rollout_all=q)
        weight, keep, shift = correction(batch)
        yield Pulls(np.exp(rollout.sum(axis=1)), pairs, np.where(keep & mask, weight * advantage, 0.0), shift)


def expected_update(
    problem: Problem, policies: Policies, correction: Correction, baseline: float, scale: float
) -> np.ndarray:
    """E_q[sum_t weight_t A (e_a - c(.|s_t))]; arguments and errors of `pulls`. (S, V)"""
    states, vocabulary = problem.shape
    total = np.zeros(states * vocabulary)
    away = np.zeros((states, vocabulary))  # what the centred score subtracts
    for probability, pairs, gain, shift in pulls(problem, policies, correction, baseline, scale):
        mask, row = pairs >= 0, np.maximum(pairs, 0) // vocabulary
        gain = gain * probability[:, None]
        total += np.bincount(pairs[mask], gain[mask], minlength=total.size)
        away += np.bincount(row[mask], gain[mask], minlength=states)[:, None] * np.exp(policies.train)
        if not isinstance(shift, int | float):
            np.add.at(away, row[mask], (gain[..., None] * shift)[mask])
    return total.reshape(states, vocabulary) - away


def update_variance(
    problem: Problem, policies: Policies, correction: Correction, baseline: float, scale: float
) -> float:
    """Total variance of one response's update, E_q |u|^2 - |E_q u|^2; a batch of N has 1/N of it.

    Arguments and errors of `pulls`. Every sequence's own update is laid out in full: for some thousand sequences.
    """
    states, vocabulary = problem.shape
    mean, square = np.zeros((states, vocabulary)), 0.0
    for probability, pairs, gain, shift in pulls(problem, policies, correction, baseline, scale):
        mask, row = pairs >= 0, np.maximum(pairs, 0) // vocabulary
        away = np.exp(policies.train)[row] + shift
        update = np.zeros((len(pairs), states, vocabulary))
        n = np.nonzero(mask)[0]
        np.add.at(
            update, (n, row[mask]), gain[mask][:, None] * (np.eye(vocabulary)[pairs[mask] % vocabulary] - away[mask])
        )
        mean += np.tensordot(probability, update, axes=1)
        square += float(probability @ (update**2).sum(axis=(1, 2)))
    return square - float((mean**2).sum())
