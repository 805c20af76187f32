"""Tasks: right answers, an exact reward, and a held-out tenth that depends on nothing but the prompt."""

from collections import Counter

import numpy as np
import pytest

from realmodel import tasks
from sandbox.errors import BadInput

SORT8 = tasks.TASKS["sort8"]
HELD_OUT_OF_FIRST_60 = [0, 1, 4, 7, 16, 29, 41, 52]


def test_sort8_answers_are_the_prompts_digits_in_order():
    for problem in SORT8.sample(np.random.default_rng(0), 200, held_out=False):
        digits, end = problem.prompt[:-1], problem.prompt[-1]
        assert len(digits) == 8
        assert digits.isdigit()
        assert end == ">"
        assert Counter(problem.answer) == Counter(digits)
        assert all(a <= b for a, b in zip(problem.answer, problem.answer[1:], strict=False))


def test_held_out_is_a_tenth_and_never_mixes():
    prompts = [SORT8.draw(np.random.default_rng(i)).prompt for i in range(20_000)]
    share = np.mean([tasks.is_held_out(p) for p in prompts])
    assert abs(share - 0.1) < 5 * (0.1 * 0.9 / 20_000) ** 0.5
    held_out = {p.prompt for p in SORT8.sample(np.random.default_rng(1), 500, held_out=True)}
    assert all(map(tasks.is_held_out, held_out))
    assert not any(tasks.is_held_out(p.prompt) for p in SORT8.sample(np.random.default_rng(1), 500, held_out=False))


def test_held_out_does_not_depend_on_the_process():
    """Fixed examples: a salted hash, or another one, would put cached policies and their held-out prompts at odds."""
    prompts = [f"{i:08d}>" for i in range(60)]
    assert [i for i, p in enumerate(prompts) if tasks.is_held_out(p)] == HELD_OUT_OF_FIRST_60


def test_reward_is_one_only_for_answer_then_eos():
    answer, eos = [5, 6, 7], 1
    assert tasks.reward([5, 6, 7, 1], answer, eos) == 1.0
    for wrong in ([5, 6, 7], [5, 6, 1], [5, 7, 6, 1], [5, 6, 7, 1, 1], [5, 6, 7, 8, 1], [], [1]):
        assert tasks.reward(wrong, answer, eos) == 0.0


def test_unknown_task():
    with pytest.raises(BadInput, match="task 'sort9' is unknown, expected one of: sort8"):
        tasks.get("sort9")
