"""Problem: a deterministic finite-state autoregressive model, the tabular stand-in for "prompt, response, reward".

In state s the policy draws token a, earns reward[s, a] and moves to transition[s, a]; -1 ends the episode, as does
the horizon. A bandit has one state, a prefix tree one state per prefix, and a small state machine with thousands of
steps is the length of an LLM response: all are exact, because every quantity of `exact.py` is a recursion over states.
Constructors: `bandit`, `tree`, `sparse_tree`, `state_machine`. A `Case` is a problem with the weights of trainer and
sampler and the offset of the sampler's engine: what PROBLEM.json describes (`problem_json.py`). `PRESETS` names some.
"""

import math
import reprlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from scipy import sparse

from sandbox.errors import BadInput

LARGEST = 1e100  # magnitude of an input, so that squares and sums stay finite
END = -1  # indexes the last entry of a value array of S + 1 entries, the one that stays 0


@dataclass(frozen=True, eq=False)
class Problem:
    """THEORY section 3. Nested lists are accepted; arrays are copied and made read-only.

    Args:
        transition: next state of each (state, token); -1 = episode ends. int (S, V)
        reward: summed along the episode. (S, V)
        horizon: largest number of tokens T of a response.
        initial: state that every episode starts in.
    Raises BadInput: naming field and index, for ragged rows, states out of range, nan or infinite rewards, horizon < 1,
    V < 2.
    """

    transition: np.ndarray
    reward: np.ndarray
    horizon: int
    initial: int = 0

    def __post_init__(self) -> None:
        transition = table("transition", self.transition)
        whole = transition == np.floor(transition)
        refuse("transition", "is not an integer", transition, ~whole)
        refuse("transition", f"is out of range -1..{len(transition) - 1}", transition, transition < END)
        refuse("transition", f"is out of range -1..{len(transition) - 1}", transition, transition >= len(transition))
        reward = table("reward", self.reward, transition.shape)
        for name, value in (("horizon", self.horizon), ("initial", self.initial)):
            if isinstance(value, bool) or not isinstance(value, int | np.integer):
                raise BadInput(f"{name} is {reprlib.repr(value)}, expected an integer")
        if self.horizon < 1:
            raise BadInput(f"horizon is {reprlib.repr(self.horizon)}, expected at least 1")
        if not 0 <= self.initial < len(transition):
            raise BadInput(f"initial is {reprlib.repr(self.initial)}, out of range 0..{len(transition) - 1}")
        transition = transition.astype(np.int64)
        for name, array in (("transition", transition), ("reward", reward)):
            array.setflags(write=False)
            object.__setattr__(self, name, array)

    @property
    def shape(self) -> tuple[int, int]:
        """(S, V): number of states, size of the vocabulary."""
        return self.transition.shape

    @cached_property
    def layers(self) -> tuple[slice | np.ndarray, ...]:
        """States that can occur at t = 0 .. T-1 (a slice where they are consecutive). In a tree, one depth each."""
        step: dict[bytes, np.ndarray] = {}
        index: dict[bytes, slice | np.ndarray] = {}
        states, layers = np.array([self.initial]), []
        for _ in range(self.horizon):
            key = states.tobytes()
            if key not in step:
                step[key] = np.unique(self.transition[states])
                step[key] = step[key][step[key] != END]
                consecutive = len(states) > 0 and states[-1] - states[0] == len(states) - 1
                index[key] = slice(int(states[0]), int(states[-1]) + 1) if consecutive else states
            layers.append(index[key])
            states = step[key]
        return tuple(layers)

    @cached_property
    def layered(self) -> bool:
        """True where every state can occur at one time only (trees, bandits), so that none repeats on a path."""
        visits = np.zeros(len(self.transition), dtype=int)
        for states in self.layers:
            visits[states] += 1
            if visits.max() > 1:
                return False
        return True

    @cached_property
    def arrivals(self) -> sparse.csr_array:
        """Sums over the (state, token) pairs that lead to each state. (S, S V), entries 0 or 1"""
        pairs = np.flatnonzero(self.transition != END)
        ones = np.ones(len(pairs))
        return sparse.csr_array(
            (ones, (self.transition.ravel()[pairs], pairs)), (len(self.transition), self.reward.size)
        )


def table(field: str, values: Any, shape: tuple[int, ...] | None = None) -> np.ndarray:
    """`values` as a new finite (S, V) array with S >= 1, V >= 2; of `shape` where one is given.

    Raises BadInput naming the field and the first bad row or entry.
    """
    rows = list(values) if isinstance(values, list | tuple) or (isinstance(values, np.ndarray) and values.ndim) else []
    if not rows or any(not isinstance(row, list | tuple | np.ndarray) for row in rows):
        raise BadInput(f"{field} is not a table of S rows and V columns")
    for s, row in enumerate(rows):
        if len(row) != len(rows[0]):
            raise BadInput(f"{field}[{s}] has {len(row)} entries, expected {len(rows[0])}")
    numeric = isinstance(values, np.ndarray) and values.dtype.kind in "iuf"
    for s, row in enumerate([] if numeric else rows):
        for a, entry in enumerate(row):
            if isinstance(entry, bool | np.bool_) or not isinstance(entry, int | float | np.integer | np.floating):
                raise BadInput(f"{field}[{s}][{a}] is {reprlib.repr(entry)}, expected a number")
            if isinstance(entry, int) and abs(entry) > LARGEST:
                raise BadInput(f"{field}[{s}][{a}] is {reprlib.repr(entry)}, which is larger than {LARGEST:g}")
    result = np.array(rows, dtype=float)
    if result.ndim != 2:
        raise BadInput(f"{field} has shape {result.shape}, expected (S, V)")
    if result.shape[1] < 2:
        raise BadInput(f"{field}[0] has {result.shape[1]} entry, expected a vocabulary of at least 2")
    if shape is not None and result.shape != shape:
        raise BadInput(f"{field} has shape {result.shape}, expected {shape}")
    refuse(field, "is not finite", result, ~np.isfinite(result))
    refuse(field, f"is larger than {LARGEST:g}", result, np.abs(result) > LARGEST)
    return result


def refuse(field: str, what: str, values: np.ndarray, bad: np.ndarray) -> None:
    """Raises BadInput naming the first entry where `bad` holds. Any shape"""
    if bad.any():
        s, a = np.argwhere(bad)[0]
        raise BadInput(f"{field}[{s}][{a}] is {values[s, a]:g}, which {what}")


def bandit(rewards: Any) -> Problem:
    """K-armed bandit: S = 1, T = 1, reward of each arm. (K,) Raises BadInput for anything but a list of numbers."""
    if not isinstance(rewards, list | tuple | np.ndarray) or (isinstance(rewards, np.ndarray) and rewards.ndim != 1):
        raise BadInput(f"rewards is {reprlib.repr(rewards)}, expected a list of numbers")
    return Problem(np.full((1, len(rewards)), END), table("rewards", [list(rewards)]), horizon=1)


def tree(depth: int, vocabulary: int, leaf_reward: np.ndarray) -> Problem:
    """Prefix tree: S = (V^T - 1)/(V - 1) states in breadth-first order, the reward earned with the last token.

    Args:
        leaf_reward: reward of each sequence, in the order of its tokens read as a number in base V. (V**depth,)
    Raises BadInput: sizes that do not fit.
    """
    if depth < 1 or vocabulary < 2:
        raise BadInput(f"depth is {depth} and vocabulary {vocabulary}, expected at least 1 and 2")
    if len(leaf_reward) != vocabulary**depth:
        raise BadInput(f"leaf_reward has {len(leaf_reward)} entries, expected {vocabulary**depth}")
    states = (vocabulary**depth - 1) // (vocabulary - 1)
    first_leaf_parent = states - vocabulary ** (depth - 1)
    transition = np.arange(1, states * vocabulary + 1).reshape(states, vocabulary)
    transition[first_leaf_parent:] = END
    reward = np.zeros((states, vocabulary))
    reward[first_leaf_parent:] = np.reshape(leaf_reward, (-1, vocabulary))
    return Problem(transition, reward, horizon=depth)


def sparse_tree(rng: np.random.Generator, depth: int = 6, vocabulary: int = 4, top: float = 0.1) -> Problem:
    """Tree whose reward is 1 for the best share `top` of all sequences under a random additive score, 0 for the rest.

    THEORY section 6. Score of a sequence: sum over t of a standard normal drawn for each (t, token).
    BadInput for a share outside (0, 1).
    """
    if not 0 < top < 1:
        raise BadInput(f"top is {top}, expected a share in (0, 1)")
    score = np.zeros(1)
    for _ in range(depth):
        score = np.add.outer(score, rng.normal(size=vocabulary)).ravel()
    best = np.argsort(-score, kind="stable")[: max(1, math.floor(top * score.size))]
    reward = np.zeros(score.size)
    reward[best] = 1.0
    return tree(depth, vocabulary, reward)


def state_machine(rng: np.random.Generator, states: int, vocabulary: int, horizon: int) -> Problem:
    """Machine with random transitions that never ends early; one random token of each state earns 1 / T.

    The return is the share of right tokens, in [0, 1], and 1 / V under the uniform policy.
    Raises BadInput for a size below 1.
    """
    for name, value, least in (("states", states, 1), ("vocabulary", vocabulary, 2), ("horizon", horizon, 1)):
        if value < least:
            raise BadInput(f"{name} is {value}, expected at least {least}")
    transition = rng.integers(states, size=(states, vocabulary))
    reward = np.zeros((states, vocabulary))
    reward[np.arange(states), rng.integers(vocabulary, size=states)] = 1.0 / horizon
    return Problem(transition, reward, horizon)


@dataclass(frozen=True, eq=False)
class Case:
    """A problem and who plays it; arrays are copied and made read-only. `policy.policies_of` gives pi, mu and q.

    Args:
        logits: theta, what the trainer holds. (S, V)
        sampler_logits: theta', what the sampler loaded at its last sync. (S, V)
        sampler_log_offset: added to the sampler's log-probabilities, which are then renormalised; 0 for an exact
            sampler. nats. (S, V)
    Raises BadInput: naming field and index.
    """

    problem: Problem
    logits: np.ndarray
    sampler_logits: np.ndarray
    sampler_log_offset: np.ndarray

    def __post_init__(self) -> None:
        for name in ("logits", "sampler_logits", "sampler_log_offset"):
            array = table(name, getattr(self, name), self.problem.shape)
            array.setflags(write=False)
            object.__setattr__(self, name, array)


def two_armed(seed: int = 0) -> Case:
    """Rewards 0 and 1; P(better arm) is 1/2 for the trainer, 1/3 for the sampler's weights, 3/7 for what it draws from:
    every quantity is a fraction or its logarithm."""
    tables = (np.array([[0.0, math.log(odds)]]) for odds in (1.0, 0.5, 1.5))
    return Case(bandit([0.0, 1.0]), *tables)


def _with_noise(problem: Problem, seed: int, logits: float, lag: float, offset: float) -> Case:
    """Independent normal sampler logits, lag and offset of the given standard deviations."""
    rng = np.random.default_rng(seed)
    sampler = logits * rng.normal(size=problem.shape)
    trainer = sampler + lag * rng.normal(size=problem.shape)
    return Case(problem, trainer, sampler, offset * rng.normal(size=problem.shape))


def _machine(seed: int, size: tuple[int, int, int], logits: float, lag: float, offset: float) -> Case:
    return _with_noise(
        state_machine(np.random.default_rng(2 * seed), *size), 2 * seed + 1, logits=logits, lag=lag, offset=offset
    )


def negative_prefixes(seed: int = 0) -> Case:
    """The first token leads to a state that earns with every token or, twice as likely, to one that never earns.

    Nothing that happens in the lost state matters, so the gradient there is 0 and any lag there stays what it is under
    exact correction. Its mean advantage is negative: the uncorrected update pushes the trainer away from the sampler
    there, the further the more (H > 0), and the lag grows geometrically.
    """
    horizon, start, won, lost = 32, 0, 1, 2
    transition = np.array([[won, lost, lost], [won] * 3, [lost] * 3])
    reward = np.zeros((3, 3))
    reward[won] = 1.0 / (horizon - 1)
    logits = np.zeros((3, 3))
    logits[lost] = [0.1, 0.0, -0.1]
    return Case(Problem(transition, reward, horizon, start), logits, np.zeros((3, 3)), np.zeros((3, 3)))


# hidden_collapse: the per-token KL on the sampler's prefixes is .005 and looks healthy, the sequence ESS is under 1/2.
# A preset is drawn anew by another seed; bandit and negative_prefixes have nothing random in them.
PRESETS: dict[str, Callable[..., Case]] = {
    "bandit": two_armed,
    "sparse_tree": lambda seed=0: _with_noise(
        sparse_tree(np.random.default_rng(2 * seed)), 2 * seed + 1, logits=0.5, lag=0.1, offset=0.3
    ),
    "machine": lambda seed=0: _machine(seed, (16, 4, 64), 0.5, 0.05, 0.05),
    "long": lambda seed=0: _machine(seed, (64, 32, 4096), 1.0, 0.0, 0.02),
    "hidden_collapse": lambda seed=0: _machine(seed, (16, 4, 128), 0.5, 0.115, 0.02),
    "negative_prefixes": negative_prefixes,
}
