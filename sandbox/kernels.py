"""The simulator's inner loops, compiled: draw a batch, add its advantages up, move. No formula of a correction is here.

They touch the visited states alone: a training step costs what its batch visits, not the size of the problem. One run
comes after the other, so nothing of one reaches another, and a run's tables stay in the cache while they are in use.
"""

from typing import NamedTuple

import numpy as np
from numba import njit

LOGITS, TRAIN, LAG, BELOW = range(4)  # of the tables of `pack`
ADVANTAGE_EPS = 1e-6  # added to the standard deviation of the return, as group-normalising trainers do


@njit(cache=True, nogil=True)
def draw(tables, uniform, transition, initial, reward, pairs, visited, returns, log_weight):
    """Responses of one run by inverting the cumulative distribution, with their return and their log weight.

    Args:
        tables: of this run, as in `pack`. (S, 4, V)
        uniform: uniform numbers in [0, 1). (N, T)
        transition, initial, reward: of the problem. (S, V)
        pairs: filled with s V + a of each token, -1 after the end. int (N, T)
        visited: filled with the state s of each token, -1 after the end. int (N, T)
        returns, log_weight: filled with the sums of reward and lag. (N,)
    """
    responses, horizon = uniform.shape
    vocabulary = transition.shape[1]
    state = np.full(responses, initial)
    returns[:] = 0.0
    log_weight[:] = 0.0
    for t in range(horizon):  # outside: the responses do not wait for one another
        for n in range(responses):
            if state[n] < 0:
                pairs[n, t] = visited[n, t] = -1
                continue
            s, u, token = np.uint64(state[n]), uniform[n, t], np.uint64(0)  # unsigned: no negative indices
            for a in range(np.uint64(vocabulary - 1)):
                token += np.uint64(u >= tables[s, BELOW, a])
            pairs[n, t], visited[n, t] = s * np.uint64(vocabulary) + token, s
            returns[n] += reward[s, token]
            log_weight[n] += tables[s, LAG, token]
            state[n] = transition[s, token]


@njit(cache=True, nogil=True)
def advantages(returns, normalised, gain):
    """Returns minus their mean, over their standard deviation + 1e-6 where normalised, one per response. (N,) each"""
    mean = returns.mean()
    scale = np.sqrt(((returns - mean) ** 2).mean()) + ADVANTAGE_EPS if normalised else 1.0
    gain[:] = (returns - mean) / scale


@njit(cache=True, nogil=True)
def add_up(pairs, visited, gain, vocabulary, place, rows, mass, first, count):
    """Sum of the gains of one run's tokens at each visited (state, token), appended to `rows` and `mass`.

    Args:
        pairs, visited: int (N, T), as `draw` leaves them; dividing one for the other would cost more than all the rest.
        gain: of each response, (N, 1), or of each token, (N, T).
        place: where each state stands in `rows`; all -1 before and after. int (S,)
        rows, mass: (most,), (most, V), filled from `count` on: first + s, in the order of the first visit, and the sum.
    Returns: `count` and the rows added.
    """
    responses, horizon = pairs.shape
    start, per_token = count, gain.shape[1] > 1
    for n in range(responses):
        for t in range(horizon):
            if visited[n, t] < 0:
                break
            state = np.uint64(visited[n, t])
            if place[state] < 0:
                place[state] = count
                rows[np.uint64(count)] = first + np.int64(state)
                mass[np.uint64(count)] = 0.0
                count += 1
            token = np.uint64(pairs[n, t]) - state * np.uint64(vocabulary)
            mass[np.uint64(place[state]), token] += gain[n, t if per_token else 0]
    for at in range(start, count):
        place[rows[at] - first] = -1
    return count


@njit(cache=True, nogil=True)
def add_up_all(pairs, visited, gain, vocabulary, place, rows, mass):
    """`add_up` of every run; a row is run S + s. int (R, N, T), (R, N, 1 or T). Returns the number of rows."""
    count = 0
    for run in range(len(pairs)):
        first = run * len(place)
        count = add_up(pairs[run], visited[run], gain[run], vocabulary, place, rows, mass, first, count)
    return count


@njit(cache=True, nogil=True)
def sample(tables, sync, uniform, transition, initial, reward, normalised, room):
    """`draw`, `advantages` and `add_up` of every run, one after the other, and log pi and log mu of the visited rows.

    Args:
        tables: (R, S, 4, V). sync: log mu. (R, S, V)
        room: `Scratch`, filled.
    Returns: the number of rows.
    """
    count, states = 0, len(transition)
    for run in range(len(uniform)):
        own, own_sync, start, first = tables[run], sync[run], count, run * states
        pairs, visited, returns, log_weight = (
            room.pairs[run],
            room.visited[run],
            room.returns[run],
            room.log_weight[run],
        )
        draw(own, uniform[run], transition, initial, reward, pairs, visited, returns, log_weight)
        advantages(returns, normalised, room.gain[run, :, 0])
        gain, vocabulary = room.gain[run], len(reward[0])
        count = add_up(pairs, visited, gain, vocabulary, room.place, room.rows, room.mass, first, count)
        for at in range(start, count):
            state = np.uint64(room.rows[at] - first)
            room.train[at] = own[state, TRAIN]
            room.sync[at] = own_sync[state]
    return count


@njit(cache=True, nogil=True)
def move(rows, mass, weight, centre, rate, tables, moved):
    """logits[row] += rate * sum_a weight mass (e_a - centre), and a copy of those rows with the tokens first.

    Args:
        rows, mass: of `add_up`, its count of them. (M,), (M, V)
        weight, centre: (M, V), or (1, V) for every row alike.
        tables: its logits change. (R S, 4, V)
        moved: filled with the new logits of the rows. (V, M)
    """
    vocabulary, alike = mass.shape[1], len(weight) == 1
    for i in range(len(rows)):
        row, total, w = np.uint64(rows[i]), 0.0, 0 if alike else i
        for a in range(vocabulary):
            mass[i, a] *= weight[w, a]
            total += mass[i, a]
        for a in range(vocabulary):
            tables[row, LOGITS, a] += rate * (mass[i, a] - centre[i, a] * total)
            moved[a, i] = tables[row, LOGITS, a]


@njit(cache=True, nogil=True)
def store(rows, moved, sync, tables):
    """log pi of the moved rows and the lag it has from log mu. (M,), (V, M), (M, V), (R S, 4, V)"""
    for i in range(len(rows)):
        row = np.uint64(rows[i])
        for a in range(len(moved)):
            tables[row, TRAIN, a] = moved[a, i]
            tables[row, LAG, a] = moved[a, i] - sync[i, a]


def pack(logits: np.ndarray, train: np.ndarray, lag: np.ndarray, rollout: np.ndarray) -> np.ndarray:
    """What a step reads and writes of each state, side by side: logits, log pi, lag, cumulative q. (R, S, 4, V)

    The last entry of the cumulative q, which rounding may leave below 1, is never read.
    """
    return np.stack([logits, train, lag, np.cumsum(np.exp(rollout), axis=-1)], axis=-2)


class Scratch(NamedTuple):
    """Arrays that every step fills anew."""

    uniform: np.ndarray  # (R, N, T)
    pairs: np.ndarray  # int (R, N, T)
    visited: np.ndarray  # int (R, N, T)
    returns: np.ndarray  # (R, N)
    log_weight: np.ndarray  # (R, N)
    gain: np.ndarray  # advantage of each response, (R, N, 1)
    place: np.ndarray  # int (S,)
    rows: np.ndarray  # int (most,)
    mass: np.ndarray  # (most, V)
    train: np.ndarray  # log pi of the rows, (most, V)
    sync: np.ndarray  # log mu of the rows, (most, V)


def scratch(runs: int, responses: int, horizon: int, states: int, vocabulary: int) -> Scratch:
    """For R runs of N responses of up to T tokens."""
    most = runs * min(states, responses * horizon)
    return Scratch(
        uniform=np.empty((runs, responses, horizon)),
        pairs=np.empty((runs, responses, horizon), dtype=np.int64),
        visited=np.empty((runs, responses, horizon), dtype=np.int64),
        returns=np.empty((runs, responses)),
        log_weight=np.empty((runs, responses)),
        gain=np.empty((runs, responses, 1)),
        place=np.full(states, -1),
        rows=np.empty(most, dtype=np.int64),
        mass=np.empty((most, vocabulary)),
        train=np.empty((most, vocabulary)),
        sync=np.empty((most, vocabulary)),
    )
