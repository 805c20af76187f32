"""The compiled inner loops of the simulator: draw a batch, add its advantages up, move. No correction is computed here.

They touch only the visited states, so a training step costs what its batch visits, not the size of the problem. One run
comes after the other, so no run affects another. A step waits for memory. So one table holds all there is of a state
side by side, and visited states are columns, tokens first, which is where numpy is fastest.
"""

from typing import NamedTuple

import numpy as np
from numba import njit

BELOW, TRAIN, SYNC, LOGITS = range(4)  # of `tables`
ADVANTAGE_EPS = 1e-6  # added to the standard deviation of the return, as group-normalising trainers do


@njit(cache=True, nogil=True)
def draw(table, uniform, transition, initial, reward, first, count, room, slot, returns, log_weight):
    """Responses of one run by inverting the cumulative distribution, with their return and their log weight.

    Args:
        table: of this run. (S, 4, V)
        uniform: uniform numbers in [0, 1). (N, T)
        transition, initial, reward: of the problem. (S, V)
        first: row of the run's state 0.
        count: rows there are; those of this run follow.
        room: `Scratch`; its `rows` are filled, their `mass` emptied.
        slot: filled with where in `mass` each token counts, -1 after the end. int (N, T)
        returns, log_weight: filled with the sums of reward and lag. (N,)
    Returns: `count` and the rows added.
    """
    place, rows, mass = room.place, room.rows, room.mass
    responses, horizon = uniform.shape
    vocabulary, most, start = transition.shape[1], len(rows), count
    state = np.full(responses, initial)
    returns[:] = 0.0
    log_weight[:] = 0.0
    for t in range(horizon):  # outside: the responses do not wait for one another
        for n in range(responses):
            if state[n] < 0:
                slot[n, t] = -1
                continue
            s, u, token = np.uint64(state[n]), uniform[n, t], np.uint64(0)  # unsigned: no negative indices
            for a in range(np.uint64(vocabulary - 1)):
                token += np.uint64(u >= table[s, BELOW, a])
            if place[s] < 0:
                place[s] = count
                rows[count] = first + np.int64(s)
                mass[:, count] = 0.0
                count += 1
            slot[n, t] = token * np.uint64(most) + np.uint64(place[s])
            returns[n] += reward[s, token]
            log_weight[n] += table[s, TRAIN, token] - table[s, SYNC, token]
            state[n] = transition[s, token]
    for at in range(start, count):
        place[rows[at] - first] = -1
    return count


@njit(cache=True, nogil=True)
def advantages(returns, normalised, gain):
    """Returns minus their mean, over their standard deviation + 1e-6 where normalised, one per response. (N,) each"""
    mean = returns.mean()
    scale = np.sqrt(((returns - mean) ** 2).mean()) + ADVANTAGE_EPS if normalised else 1.0
    gain[:] = (returns - mean) / scale


@njit(cache=True, nogil=True)
def add_up(slot, gain, mass):
    """Add the gain of each response, (N, 1), or of each token, (N, T), to its place in `mass`, (V most,)."""
    responses, horizon = slot.shape
    per_token = gain.shape[1] > 1
    for n in range(responses):
        for t in range(horizon):
            if slot[n, t] < 0:
                break
            mass[np.uint64(slot[n, t])] += gain[n, t if per_token else 0]


@njit(cache=True, nogil=True)
def sample(tables, transition, initial, reward, normalised, room):
    """`draw`, `advantages` and `add_up` of every run, one after the other; log pi and log mu of the visited rows.

    Args:
        tables: (R, S, 4, V)
        room: `Scratch`, its uniform numbers drawn; the rest is filled.
    Returns: the number of rows.
    """
    count, states, vocabulary = 0, len(transition), len(reward[0])
    flat = room.mass.reshape(-1)
    for run in range(len(room.uniform)):
        table, start, first = tables[run], count, run * states
        slot, returns, gain = room.slot[run], room.returns[run], room.gain[run]
        problem = transition, initial, reward
        count = draw(table, room.uniform[run], *problem, first, count, room, slot, returns, room.log_weight[run])
        advantages(returns, normalised, gain[:, 0])
        add_up(slot, gain, flat)
        for at in range(start, count):
            state = np.uint64(room.rows[at] - first)
            for a in range(vocabulary):
                room.train[a, at] = table[state, TRAIN, a]
                room.sync[a, at] = table[state, SYNC, a]
    return count


@njit(cache=True, nogil=True)
def move(rows, change, rate, table, after):
    """logits += rate * change at those rows, and a copy of them. (M,), (V, M), number, (R S, 4, V), (V, M)"""
    for i in range(len(rows)):
        row = np.uint64(rows[i])
        for a in range(len(change)):
            table[row, LOGITS, a] += rate * change[a, i]
            after[a, i] = table[row, LOGITS, a]


@njit(cache=True, nogil=True)
def store(rows, train, table):
    """log pi of those rows. (M,), (V, M), (R S, 4, V)"""
    for i in range(len(rows)):
        for a in range(len(train)):
            table[np.uint64(rows[i]), TRAIN, a] = train[a, i]


def tables(logits: np.ndarray, train: np.ndarray, sync: np.ndarray, rollout: np.ndarray) -> np.ndarray:
    """What a step reads and writes of each state: cumulative q, log pi, log mu and logits, (R, S, V) each. (R, S, 4, V)

    The last entry of the cumulative q, which rounding may leave below 1, is never read. At V = 4 a state fills two
    cache lines of 64 bytes from the first byte on; numpy promises only 16.
    """
    size = 4 * logits.size
    room = np.empty(size + 7)
    packed = room[-room.ctypes.data % 64 // 8 :][:size].reshape(*logits.shape[:-1], 4, -1)
    packed[..., BELOW, :] = np.cumsum(np.exp(rollout), axis=-1)
    packed[..., TRAIN, :], packed[..., SYNC, :], packed[..., LOGITS, :] = train, sync, logits
    return packed


class Scratch(NamedTuple):
    """Arrays that every step fills anew. most: rows there can be."""

    uniform: np.ndarray  # (R, N, T)
    slot: np.ndarray  # place of each token in `mass`, flat: a most + row; -1 after the end. int (R, N, T)
    returns: np.ndarray  # (R, N)
    log_weight: np.ndarray  # (R, N)
    gain: np.ndarray  # advantage of each response, (R, N, 1)
    place: np.ndarray  # where each state stands in `rows`; all -1 between runs. int (S,)
    rows: np.ndarray  # visited states, run S + s. int (most,)
    mass: np.ndarray  # sum of the gains at each (state, token). (V, most)
    train: np.ndarray  # log pi of the rows, (V, most)
    sync: np.ndarray  # log mu of the rows, (V, most)


def scratch(runs: int, responses: int, horizon: int, states: int, vocabulary: int) -> Scratch:
    """For R runs of N responses of up to T tokens."""
    most = runs * min(states, responses * horizon)
    return Scratch(
        uniform=np.empty((runs, responses, horizon)),
        slot=np.empty((runs, responses, horizon), dtype=np.int64),
        returns=np.empty((runs, responses)),
        log_weight=np.empty((runs, responses)),
        gain=np.empty((runs, responses, 1)),
        place=np.full(states, -1),
        rows=np.empty(most, dtype=np.int64),
        mass=np.empty((vocabulary, most)),
        train=np.empty((vocabulary, most)),
        sync=np.empty((vocabulary, most)),
    )
