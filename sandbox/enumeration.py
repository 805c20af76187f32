"""Expected update over all sequences, one by one, for weights that are no product of tokens (sequence weights, PPO)."""

from dataclasses import replace

import numpy as np

from sandbox.batch import Batch
from sandbox.corrections import Correction
from sandbox.errors import BadInput
from sandbox.policy import Policies
from sandbox.problems import END, Problem
from sandbox.transfer import log_sum_plain

MOST = 2**20  # sequences
CHUNK = 2**22  # numbers per table at a time


def count(problem: Problem) -> float:
    """Number of sequences; inf where it is beyond any float."""
    with np.errstate(over="ignore"):
        return float(np.exp(log_sum_plain(problem, np.zeros(problem.shape))))


def sequences(problem: Problem) -> np.ndarray:
    """Every sequence as flat indices s V + a of its tokens, -1 after the end. int (N, T)

    Raises:
        BadInput: with the number, where there are more than `MOST`.
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


def expected_update(
    problem: Problem, policies: Policies, correction: Correction, baseline: float, scale: float
) -> np.ndarray:
    """E_q[sum_t weight_t A (e_a - c(.|s_t))] with A = (R - baseline) / scale, the correction's own code asked. (S, V)

    Raises:
        BadInput: with the number of sequences, where there are too many.
    """
    pairs = sequences(problem)
    states, vocabulary = problem.shape
    each = max(1, CHUNK // (problem.horizon * (vocabulary if correction.centres else 1)))
    total = np.zeros(states * vocabulary)
    shift = np.zeros((states, vocabulary))  # what the centred score subtracts
    for start in range(0, len(pairs), each):
        chunk = pairs[start : start + each]
        mask, row = chunk >= 0, np.maximum(chunk, 0) // vocabulary
        train, sync, rollout, reward = (
            np.where(mask, x.ravel()[chunk], 0.0) for x in (*policies, np.asarray(problem.reward))
        )
        advantage = (reward.sum(axis=1, keepdims=True) - baseline) / scale
        batch = Batch(train, rollout, mask, advantage, sync)
        if correction.centres:
            pi, mu, q = (p[row] for p in policies)
            batch = replace(batch, logp_train_all=pi, logp_sync_all=mu, logp_rollout_all=q)
        weight, keep, centre = correction(batch)
        probability = np.exp(rollout.sum(axis=1, keepdims=True))
        gain = np.where(keep & mask, weight * advantage * probability, 0.0)
        total += np.bincount(chunk[mask], gain[mask], minlength=total.size)
        shift += np.bincount(row[mask], gain[mask], minlength=states)[:, None] * np.exp(policies.train)
        if not isinstance(centre, int | float):
            np.add.at(shift, row[mask], (gain[..., None] * centre)[mask])
    return total.reshape(states, vocabulary) - shift
