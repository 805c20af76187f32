"""H, M and F of the feedback loop (THEORY section 5), at one policy p, with the centred advantage A = R - E_p[R].

    F = sum_s occ(s) F(s)                             Fisher information of whole responses; F(s) = diag(p) - p p'
    H = E[A hess log p] = -sum_s occ(s) Aocc(s) F(s)  what a lag adds to the uncorrected update
    M = E[A score score']                             what that update misses: the Hessian of the return is H + M

F and H have one V x V block a state. M has cross-state blocks, since the token drawn in one state meets the advantage
of a token drawn in another: M x is minus the bias that `bias.split` finds for a lag x, so its leading and within-token
parts are the block-diagonal of M, its prefix part one triangle, its downstream part the transposed triangle.
For the normalised advantage divide H and M by `exact.advantage_scale`.
"""

import numpy as np

from sandbox.errors import BadInput
from sandbox.tabular.bias import split
from sandbox.tabular.exact import advantage_visits, occupancy
from sandbox.tabular.problems import Problem

MOST_COLUMNS = 1024  # of a dense M
MOST_WORK = 10**6  # columns times horizon: some ten seconds


def f_blocks(problem: Problem, logp: np.ndarray) -> np.ndarray:
    """occ(s) (diag(p) - p p'). (S, V) -> (S, V, V)"""
    return occupancy(problem, logp)[:, None, None] * _softmax_fisher(logp)


def h_blocks(problem: Problem, logp: np.ndarray) -> np.ndarray:
    """-occ(s) Aocc(s) (diag(p) - p p'): positive where the mean advantage of the state is negative. (S, V, V)"""
    mean_advantage = (advantage_visits(problem, logp) * np.exp(logp)).sum(axis=-1)
    return -mean_advantage[:, None, None] * _softmax_fisher(logp)


def _softmax_fisher(logp: np.ndarray) -> np.ndarray:
    p = np.exp(logp)
    return p[:, :, None] * np.eye(p.shape[1]) - p[:, :, None] * p[:, None, :]


def f_product(problem: Problem, logp: np.ndarray, x: np.ndarray) -> np.ndarray:
    """F x without F. (S, V) -> (S, V)"""
    return occupancy(problem, logp)[:, None] * _fisher_x(logp, x)


def h_product(problem: Problem, logp: np.ndarray, x: np.ndarray) -> np.ndarray:
    """H x without H. (S, V) -> (S, V)"""
    mean_advantage = (advantage_visits(problem, logp) * np.exp(logp)).sum(axis=-1, keepdims=True)
    return -mean_advantage * _fisher_x(logp, x)


def _fisher_x(logp: np.ndarray, x: np.ndarray) -> np.ndarray:
    p = np.exp(logp)
    return p * (x - (p * x).sum(axis=-1, keepdims=True))


def m_product(problem: Problem, logp: np.ndarray, x: np.ndarray) -> np.ndarray:
    """M x without M, by recursion. (S, V) -> (S, V)"""
    return -split(problem, logp, x).total


def m_dense(problem: Problem, logp: np.ndarray) -> np.ndarray:
    """M column by column. (S V, S V)

    Raises BadInput: with the size, where that would take more than some ten seconds; `m_product` has no such limit.
    """
    columns = logp.size
    if columns > MOST_COLUMNS or columns * problem.horizon > MOST_WORK:
        raise BadInput(
            f"matrix M has {columns} columns of {problem.horizon} steps each, more than {MOST_COLUMNS} columns"
            f" or {MOST_WORK} steps in all: use products with it"
        )
    unit = np.eye(columns).reshape(columns, *logp.shape)
    return np.stack([m_product(problem, logp, x).ravel() for x in unit], axis=1)


def eigenvalues(problem: Problem, logp: np.ndarray) -> dict[str, np.ndarray]:
    """Sorted eigenvalues of H, M and F, ascending; one a state is 0, for the constant direction. (S V,) each"""
    dense = m_dense(problem, logp)
    return {
        "H": np.sort(np.linalg.eigvalsh(h_blocks(problem, logp)).ravel()),
        "M": np.linalg.eigvalsh((dense + dense.T) / 2),
        "F": np.sort(np.linalg.eigvalsh(f_blocks(problem, logp)).ravel()),
    }
