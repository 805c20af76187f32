"""The yardstick of the simulator's speed: the same training, one run after the other, in plain numpy.

What one would write first: policies recomputed from the logits at every step, all responses of a batch drawn at once,
nothing shared between runs. Token-level corrections only. `make bench` compares `simulate.run` with it.
"""

import numpy as np

from sandbox.tabular.problems import Problem


def log_softmax(x: np.ndarray) -> np.ndarray:
    x = x - x.max(axis=-1, keepdims=True)
    return x - np.log(np.exp(x).sum(axis=-1, keepdims=True))


def train(
    rng: np.random.Generator, problem: Problem, step_size: float, n: int, steps: int, correction: str, cap: float = 2.0
) -> np.ndarray:
    """Logits after `steps` updates from 0 with a sampler that never syncs. correction: none, tis or dlc. (S, V)"""
    states, vocabulary = problem.shape
    trainer = np.zeros((states, vocabulary))
    sampler, transition = trainer.copy(), problem.transition
    for _ in range(steps):
        pi, mu = log_softmax(trainer), log_softmax(sampler)
        below = np.cumsum(np.exp(mu), axis=-1)[:, :-1]
        uniform = rng.random((n, problem.horizon))
        state = np.full(n, problem.initial)
        pairs = np.full((n, problem.horizon), -1)
        for t in range(problem.horizon):
            alive = state >= 0
            token = (uniform[:, t, None] >= below[state]).sum(axis=-1)
            pairs[:, t] = np.where(alive, state * vocabulary + token, -1)
            state = np.where(alive, transition[state, token], -1)
        drawn = pairs >= 0
        returns = np.where(drawn, problem.reward.ravel()[pairs], 0.0).sum(axis=-1)
        log_weight = np.where(drawn, (pi - mu).ravel()[pairs], 0.0).sum(axis=-1)
        weight = np.exp(log_weight - log_weight.max())
        _ = weight.sum() ** 2 / (weight**2).sum() / n  # what a resync rule would be shown
        advantage = (returns - returns.mean()) / (returns.std() + 1e-6)
        ratio = np.ones_like(pi) if correction == "none" else np.minimum(np.exp(pi - mu), cap)
        centre = np.exp(pi)
        if correction == "dlc":
            mass = np.exp(mu) * ratio
            centre = mass / mass.sum(axis=-1, keepdims=True)
        gain = ratio.ravel()[pairs] * advantage[:, None]
        mass = np.bincount(pairs[drawn], gain[drawn], minlength=states * vocabulary).reshape(states, vocabulary)
        trainer = trainer + step_size * (mass - centre * mass.sum(axis=-1, keepdims=True)) / n
    return trainer
