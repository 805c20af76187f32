"""The four recursions over states that every exact quantity is made of; next = transition[s, a], value_T = 0.

    log_sum       value(s) = logsumexp_a [k(s, a) + value(next)]                     backward, log space
    expectation   value(s) = sum_a q(a|s) [f(s, a) + value(next)]                    backward
    values        the same at every t, and with a source that may depend on t        backward
    past_moments  E_q[F^m; s_t = s], F the sum of f before t; m = 0: P_q(s_t = s)    forward

Each has two routes with the same result. The plain one passes over the (state, token) pairs that can occur at t: right
for trees, whose states occur once. For a machine with few states and many steps the tokens are first summed into the
(S, S) matrix of a step: then a step costs S^2 instead of S V, and where only the value at t = 0 is asked for, repeated
squaring takes log2 T steps. `log_sum` squares in linear space with a bound on what underflow may have lost, and goes
the plain way, in log space, where that is not negligible: an ESS of e^-500 is as exact as any other.
Leading axes, one entry per run, are allowed in `log_sum` and `expectation`.
"""

import math

import numpy as np

from sandbox.errors import BadInput
from sandbox.tabular.problems import END, Problem

SMALLEST = 1e-307  # what underflow of one product may lose
NEGLIGIBLE = 1e-14  # relative


def small(problem: Problem) -> bool:
    """Whether the matrix of a step is the cheaper route."""
    states, vocabulary = problem.shape
    return states**2 * math.log2(problem.horizon) <= 16 * vocabulary * problem.horizon and states <= 1024


def matrix(problem: Problem, table: np.ndarray) -> np.ndarray:
    """Sum over the tokens that lead from a state to another; column S: to the end. (..., S, V) -> (..., S, S + 1)"""
    states = problem.shape[0]
    column = np.where(problem.transition == END, states, problem.transition)
    index = (np.arange(states)[:, None] * (states + 1) + column).ravel()
    flat = table.reshape(-1, index.size)
    index = (np.arange(len(flat))[:, None] * states * (states + 1) + index).ravel()
    total = np.bincount(index, flat.ravel(), minlength=len(flat) * states * (states + 1))
    return total.reshape(*table.shape[:-2], states, states + 1)


def log_sum(problem: Problem, log_kernel: np.ndarray) -> np.ndarray:
    """log of the sum over all sequences of exp(sum_t log_kernel[s_t, a_t]). (..., S, V) -> (...)"""
    if small(problem):
        total, lost = log_sum_by_squaring(problem, log_kernel)
        if np.all(lost <= NEGLIGIBLE):
            return total
    return log_sum_plain(problem, log_kernel)


def log_sum_plain(problem: Problem, log_kernel: np.ndarray) -> np.ndarray:
    """`log_sum`, step by step in log space. (..., S, V) -> (...)"""
    value = np.zeros((*log_kernel.shape[:-2], problem.shape[0] + 1))
    for states in reversed(problem.layers):
        future = value[..., problem.transition[states]]
        value[..., states] = np.logaddexp.reduce(log_kernel[..., states, :] + future, axis=-1)
    return value[..., problem.initial]


def log_sum_by_squaring(problem: Problem, log_kernel: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """`log_sum` by repeated squaring of the kernel matrix, and a bound on the relative error that underflow made of it.

    Nothing is subtracted, so what is lost can be bounded as one goes: an entry (largest: 1) that is off by at most e
    makes a product of n terms off by 2 n e + n SMALLEST. nan or inf where all is lost. (..., S, V) -> (...), (...)
    """
    n = problem.shape[0] + 1
    top = np.maximum(log_kernel.max(axis=(-2, -1), keepdims=True), 0.0)
    step = np.zeros((*log_kernel.shape[:-2], n, n))
    step[..., :-1, :] = matrix(problem, np.exp(log_kernel - top))
    step[..., -1, -1] = np.exp(-top[..., 0, 0])  # the end: weight 1 for ever after
    log_step, off_step = top, np.full_like(top, SMALLEST)
    value, log_value, off_value = np.ones((*step.shape[:-1], 1)), np.zeros_like(top), np.zeros_like(top)
    left = problem.horizon
    with np.errstate(all="ignore"):
        while True:
            if left & 1:
                value, log_value = step @ value, log_step + log_value
                off_value = n * (off_step + off_value + SMALLEST)
                value, log_value, off_value = _rescaled(value, log_value, off_value)
            left >>= 1
            if not left:
                break
            step, log_step, off_step = step @ step, 2 * log_step, n * (2 * off_step + SMALLEST)
            step, log_step, off_step = _rescaled(step, log_step, off_step)
        at_start = value[..., problem.initial, 0]
        return np.log(at_start) + log_value[..., 0, 0], off_value[..., 0, 0] / at_start


def _rescaled(x: np.ndarray, log_scale: np.ndarray, off: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    top = x.max(axis=(-2, -1), keepdims=True)
    return x / top, log_scale + np.log(top), off / top


def expectation(problem: Problem, logq: np.ndarray, f: np.ndarray) -> np.ndarray:
    """E_q[sum_t f(s_t, a_t)]. (..., S, V), broadcast against each other -> (...)"""
    q = np.exp(logq)
    return expectation_by_squaring(problem, q, f) if small(problem) else expectation_plain(problem, q, f)


def expectation_plain(problem: Problem, q: np.ndarray, f: np.ndarray) -> np.ndarray:
    """`expectation`, step by step. (..., S, V) -> (...)"""
    value = np.zeros((*np.broadcast_shapes(q.shape, f.shape)[:-2], problem.shape[0] + 1))
    for states in reversed(problem.layers):
        future = value[..., problem.transition[states]]
        value[..., states] = (q[..., states, :] * (f[..., states, :] + future)).sum(axis=-1)
    return value[..., problem.initial]


def expectation_by_squaring(problem: Problem, q: np.ndarray, f: np.ndarray) -> np.ndarray:
    """value -> source + step value is one step; two of them are source + step source, step step. (S, V)"""
    source, step = (q * f).sum(axis=-1)[..., None], matrix(problem, q)[..., :-1]
    value, left = np.zeros_like(source), problem.horizon
    while True:
        if left & 1:
            value = source + step @ value
        left >>= 1
        if not left:
            return value[..., problem.initial, 0]
        source, step = source + step @ source, step @ step


def values(problem: Problem, logq: np.ndarray, source: np.ndarray) -> np.ndarray:
    """value_t(s) = source_t(s) + sum_a q(a|s) value_{t+1}(next), with value_T = 0 and 0 after the end.

    With source = sum_a q(a|s) f(s, a): what sum_{u >= t} f is worth in s at t. Meaningful for states that can occur
    at t. One policy.

    Args:
        source: (S,), or (T, S) where it depends on t.
    Returns: (T + 1, S + 1), the last column the end's: 0.
    """
    states, horizon, q = problem.shape[0], problem.horizon, np.exp(logq)
    source = np.broadcast_to(source, (horizon, states))
    result = np.zeros((horizon + 1, states + 1))
    if small(problem):
        step = matrix(problem, q)
        for t in range(horizon - 1, -1, -1):
            np.add(step @ result[t + 1], source[t], out=result[t, :-1])
        return result
    for t, occurring in reversed(list(enumerate(problem.layers))):
        future = (q[occurring] * result[t + 1][problem.transition[occurring]]).sum(axis=-1)
        result[t, occurring] = source[t, occurring] + future
    return result


def past_moments(problem: Problem, logq: np.ndarray, order: int, f: np.ndarray | None = None) -> np.ndarray:
    """E_q[F^m; s_t = s] for m = 0 .. order (at most 2), F the sum before t of f, by default the reward.

    m = 0 is P_q(s_t = s). One policy. (order + 1, T, S) Raises BadInput for another order.
    """
    if order not in (0, 1, 2):
        raise BadInput(f"order is {order}, expected 0, 1 or 2")
    q, f = np.exp(logq), problem.reward if f is None else f
    states, horizon = problem.shape[0], problem.horizon
    if small(problem):
        step, once, twice = (matrix(problem, q * f**m)[:, :-1] for m in range(3))
        zero = np.zeros_like(step)
        block = np.block([[step, once, twice], [zero, step, 2 * once], [zero, zero, step]])
        size = (order + 1) * states
        block, flat = np.ascontiguousarray(block[:size, :size]), np.zeros((horizon, size))
        flat[0, problem.initial] = 1.0
        for t in range(horizon - 1):
            np.matmul(flat[t], block, out=flat[t + 1])
        return np.moveaxis(flat.reshape(horizon, order + 1, states), 1, 0)
    moments = np.zeros((order + 1, horizon, states))
    moments[0, 0, problem.initial] = 1.0
    for t in range(horizon - 1):
        now = moments[:, t, :, None]
        after = [now[0], now[1:2].sum(axis=0) + f * now[0]]
        after.append(now[2:3].sum(axis=0) + f * (2 * now[1:2].sum(axis=0) + f * now[0]))
        flow = np.stack([(q * m).ravel() for m in after[: order + 1]], axis=1)
        moments[:, t + 1] = (problem.arrivals @ flow).T
    return moments


def ahead(problem: Problem, table: np.ndarray, future: np.ndarray) -> np.ndarray:
    """sum_a table(s, a) future_{t+1}(next), at every t. (S, V), (T + 1, S + 1) -> (T, S)"""
    if small(problem):
        return future[1:] @ matrix(problem, table).T
    return np.stack([(table * after[problem.transition]).sum(axis=-1) for after in future[1:]])


def meeting(problem: Problem, past: np.ndarray, future: np.ndarray) -> np.ndarray:
    """sum_t past_t(s) future_{t+1}(next): what comes before a token times what comes after it. (S, V)

    Args:
        past: of `past_moments`. (T, S)
        future: of `values`. (T + 1, S + 1)
    """
    if small(problem):
        return np.take_along_axis(past.T @ future[1:], problem.transition, axis=1)
    total = np.zeros(problem.shape)
    for t, states in enumerate(problem.layers):
        total[states] += past[t, states, None] * future[t + 1][problem.transition[states]]
    return total
