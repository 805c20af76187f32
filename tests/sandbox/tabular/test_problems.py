"""Problem: what it refuses, the shape of its constructors, which states can occur when, and drawing from a policy."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given

from sandbox.errors import BadInput
from sandbox.tabular import problems
from sandbox.tabular.policy import draw, log_policy
from sandbox.tabular.problems import Problem
from tests.support import reference, strategies
from tests.support.strategies import random_logits

GOOD = {"transition": [[1, -1], [0, 1]], "reward": [[0.0, 1.0], [2.0, -1.0]], "horizon": 3}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"transition": [[1, -1], [0]]}, r"transition\[1\] has 1 entries, expected 2"),
        ({"transition": [[1, 2], [0, 1]]}, r"transition\[0\]\[1\] is 2, which is out of range -1..1"),
        ({"transition": [[1, -1], [-2, 1]]}, r"transition\[1\]\[0\] is -2, which is out of range"),
        ({"transition": [[1, 0.5], [0, 1]]}, r"transition\[0\]\[1\] is 0.5, which is not an integer"),
        ({"transition": [[1, "x"], [0, 1]]}, r"transition\[0\]\[1\] is 'x', expected a number"),
        ({"transition": [[1, None], [0, 1]]}, r"transition\[0\]\[1\] is None, expected a number"),
        ({"transition": [[0], [1]]}, r"transition\[0\] has 1 entry, expected a vocabulary of at least 2"),
        ({"transition": []}, r"transition is not a table"),
        ({"transition": [1, 2]}, r"transition is not a table"),
        ({"reward": [[0.0, 1.0], [math.nan, 0.0]]}, r"reward\[1\]\[0\] is nan, which is not finite"),
        ({"reward": [[0.0, math.inf], [0.0, 0.0]]}, r"reward\[0\]\[1\] is inf, which is not finite"),
        ({"reward": [[0.0, 1.0]]}, r"reward has shape \(1, 2\), expected \(2, 2\)"),
        ({"horizon": 0}, r"horizon is 0, expected at least 1"),
        ({"horizon": 2.5}, r"horizon is 2.5, expected an integer"),
        ({"initial": 2}, r"initial is 2, out of range 0..1"),
        ({"initial": -1}, r"initial is -1, out of range 0..1"),
    ],
)
def test_bad_input_is_one_line_naming_field_and_index(change, message):
    with pytest.raises(BadInput, match=message) as error:
        Problem(**(GOOD | change))
    assert "\n" not in str(error.value)


def test_a_problem_cannot_be_changed_through_its_input_or_its_arrays():
    reward = np.array(GOOD["reward"])
    problem = Problem(GOOD["transition"], reward, 3)
    reward[0, 0] = 7.0
    assert problem.reward[0, 0] == 0.0
    with pytest.raises(ValueError, match="read-only"):
        problem.reward[0, 0] = 7.0


@given(strategies.small_problems)
def test_layers_are_the_states_that_occur(problem):
    occurring = [set() for _ in range(problem.horizon)]
    for episode in reference.episodes(problem):
        for t, (state, _) in enumerate(episode):
            occurring[t].add(state)
    every = np.arange(problem.shape[0])
    assert [set(every[states].tolist()) for states in problem.layers] == occurring
    assert problem.layered == (sum(map(len, occurring)) == len(set().union(*occurring)))


def test_tree_puts_the_reward_of_each_sequence_on_its_last_token():
    leaves = np.arange(27.0) ** 2
    problem = problems.tree(3, 3, leaves)
    assert problem.shape == (13, 3)
    assert problem.layered
    for index, tokens in enumerate(itertools.product(range(3), repeat=3)):
        state, total = 0, []
        for token in tokens:
            total.append(problem.reward[state, token])
            state = problem.transition[state, token]
        assert state == -1
        assert total == [0.0, 0.0, leaves[index]]


def test_bandit_has_one_state_and_one_step():
    problem = problems.bandit([1.0, 2.0, 5.0])
    assert problem.shape == (1, 3)
    assert list(reference.episodes(problem)) == [[(0, 0)], [(0, 1)], [(0, 2)]]
    assert [reference.reward(problem, e) for e in reference.episodes(problem)] == [1.0, 2.0, 5.0]


def test_sparse_tree_rewards_the_best_tenth_of_an_additive_score():
    problem = problems.sparse_tree(np.random.default_rng(3), depth=4, vocabulary=3, top=0.1)
    assert problem.reward.sum() == 8  # floor(0.1 * 81)
    assert set(np.unique(problem.reward)) == {0.0, 1.0}
    # Additive scores are monotone: raising one token by a better one of the same place never loses the reward.
    leaf = problem.reward[-27:].reshape(3, 3, 3, 3)
    for axis in range(4):
        counts = np.moveaxis(leaf, axis, 0).reshape(3, -1)
        order = np.argsort(counts.sum(axis=1))
        assert np.all(np.diff(counts[order], axis=0) >= 0)
    first, again, other = (problems.sparse_tree(np.random.default_rng(s)).reward for s in (3, 3, 4))
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)
    assert problems.sparse_tree(np.random.default_rng(0)).reward.sum() == 409


def test_state_machine_returns_the_share_of_right_tokens():
    problem = problems.state_machine(np.random.default_rng(0), 4, 3, 5)
    uniform = np.full(problem.shape, -math.log(3))
    assert math.isclose(reference.returns(problem, uniform), 1 / 3)
    assert all(len(e) == 5 for e in reference.episodes(problem))
    assert max(reference.reward(problem, e) for e in reference.episodes(problem)) == pytest.approx(1.0)


@pytest.mark.parametrize(
    "make",
    [
        lambda: problems.tree(2, 2, np.zeros(5)),
        lambda: problems.tree(0, 2, np.zeros(1)),
        lambda: problems.bandit([1.0]),
    ],
)
def test_constructors_refuse_impossible_sizes(make):
    with pytest.raises(BadInput):
        make()


def test_draw_has_the_frequencies_of_the_policy_and_stops_at_the_end():
    """Two runs with different policies, 40,000 responses each. Bound of 5 standard errors on each of 2 x 10 sequence
    frequencies: false alarm 1e-5; the seed is fixed."""
    problem = Problem([[1, -1, 0], [-1, 1, 1]], np.zeros((2, 3)), 3)
    rng = np.random.default_rng(5)
    logq = np.stack([log_policy(random_logits(rng, problem)) for _ in range(2)])
    n = 40_000
    pairs = draw(problem, logq, rng.random((2, n, 3)))
    for run in range(2):
        seen = 0
        for episode in reference.episodes(problem):
            p = math.exp(reference.log_prob(logq[run], episode))
            flat = [s * 3 + a for s, a in episode] + [-1] * (3 - len(episode))
            count = int((pairs[run] == flat).all(axis=-1).sum())
            assert abs(count - n * p) < 5 * math.sqrt(n * p * (1 - p))
            seen += count
        assert seen == n
