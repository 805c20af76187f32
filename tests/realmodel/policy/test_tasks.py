"""Tasks: right answers, an exact reward, and a held-out tenth that depends on nothing but the prompt."""

import json
from collections import Counter

import numpy as np
import pytest

from realmodel.policy import recipes, small, tasks
from sandbox.errors import BadInput

SORT8 = tasks.get("sort8")
HELD_OUT_OF_FIRST_60 = [0, 1, 4, 7, 16, 29, 41, 52]


@pytest.mark.parametrize("n", [1, 8, 24, 48])
def test_sorted_answers_are_the_prompts_digits_in_order(n):
    for problem in tasks.get(f"sort{n}").sample(np.random.default_rng(0), 2 if n == 1 else 200, n == 1):
        digits, end = problem.prompt[:-1], problem.prompt[-1]
        assert len(digits) == n
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


@pytest.mark.parametrize("name", ["chess", "sort", "sort08", "sort-1", "sort8 ", "xsort8", "carry3,"])
def test_unknown_task(name):
    with pytest.raises(BadInput, match=rf"task '{name}' is unknown, expected sortN \(N from 1 to 48\), add2, carry3"):
        tasks.get(name)


@pytest.mark.parametrize("n", [0, 49, 99, 10**30])
def test_sorts_have_1_to_48_digits(n):
    with pytest.raises(BadInput, match=f"task 'sort{n}' is unknown, expected sortN with N from 1 to 48"):
        tasks.get(f"sort{n}")


# the others


def draw(name: str, n: int = 60) -> list[tasks.Problem]:
    return tasks.get(name).sample(np.random.default_rng(0), n, held_out=False)


def test_addition_is_right_and_its_answer_has_one_length():
    for problem in draw("add2", 200):
        a, b = problem.prompt.removesuffix("=").split("+")
        assert (len(a), len(b), len(problem.answer)) == (2, 2, 3)
        assert int(a) + int(b) == int(problem.answer)


def test_carried_addition_is_worked_out_from_the_right():
    for problem in draw("carry3", 200):
        a, b = problem.prompt.removesuffix("=").split("+")
        *columns, total = problem.answer.split(",")
        carry = 0
        for place, column in enumerate(columns):
            left, right = column.split("=")
            x, y, carried = map(int, left.split("+"))
            assert (x, y, carried) == (int(a[2 - place]), int(b[2 - place]), carry)
            assert int(right) == x + y + carried
            carry = int(right) // 10
        assert int(total) == int(a) + int(b)
        assert len(problem.answer) + 1 == 32


@pytest.mark.parametrize("name", ["sort8", "sort48", "add2", "carry3", "spell_backward"])
def test_small_vocabulary_spells_prompts_and_answers(name):
    tokenizer = recipes.char_tokenizer()
    for problem in draw(name, 300):
        for text in (problem.prompt, problem.answer):
            ids = tokenizer.encode(text)
            assert tokenizer.unk_token_id not in ids
            assert tokenizer.decode(ids) == text
        assert set(problem.answer) <= set(tasks.get(name).answer_characters)


def test_gym_answers_are_right_by_other_means():
    for problem in draw("spell_backward"):
        word = problem.prompt.rpartition(": ")[2].removesuffix(">")
        assert problem.answer == "".join(reversed(word))


def test_gym_rewards_are_thresholded_at_one():
    """Partial scores there are: without the threshold they would be rewards between 0 and 1."""
    tokenizer = recipes.char_tokenizer()
    partial = 0
    for problem in draw("spell_backward", 20):
        right = [*tokenizer.encode(problem.answer), 1]
        for ids, want in ((right, 1.0), (right[:-1], 0.0), ([1, *right], 0.0), (right[1:], 0.0), ([1], 0.0)):
            got = problem.reward(ids, tokenizer)
            assert isinstance(got, float)
            assert got == want
        assert problem.score is not None
        near = problem.answer + "x"
        partial += 0 < problem.score(near, problem.answer) < 1
        assert problem.reward([*tokenizer.encode(near), 1], tokenizer) == 0.0
    assert partial > 10


class Words:
    """A tokenizer for text that the small vocabulary has no characters for."""

    eos_token_id = 0

    def decode(self, ids):
        return "".join(map(chr, ids))


def number_reward(text: str, answer: str) -> float:
    score = draw("made_up", 1)[0].score
    return tasks.Problem("", answer, score).reward([*map(ord, text), 0], Words())


@pytest.mark.parametrize(
    ("text", "answer", "want"),
    [
        ("75", "75", 1.0),
        ("84 - 9 = 75. The answer is \\boxed{75}.", "75", 1.0),
        ("The answer is 1,680.", "1,680", 1.0),
        ("So \\boxed{\\frac{150}{2}}", "75", 1.0),
        ("The answer is 57.", "75", 0.0),
        ("\\boxed{-75}", "75", 0.0),
        ("I do not know", "75", 0.0),
        ("", "75", 0.0),
    ],
)
def test_numbers_are_compared_as_mathematics(text, answer, want):
    got = number_reward(text, answer)
    assert isinstance(got, float)
    assert got == want


def test_made_up_problems_have_right_answers_and_both_sides():
    rows = [json.loads(line) for line in tasks.MADE_UP.read_text().splitlines()]
    assert len({row["question"] for row in rows}) == 20
    task = tasks.get("made_up")
    seen = {p.prompt: p.answer for p in (task.draw(np.random.default_rng(i)) for i in range(400))}
    assert len(seen) == 20
    for prompt, answer in seen.items():
        assert prompt.startswith("<|im_start|>user\n")
        assert prompt.endswith("<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n")
        assert answer.isdigit()
    assert 1 <= sum(map(tasks.is_held_out, seen)) <= 10


def test_a_file_of_ones_own_and_its_errors(tmp_path):
    path = tmp_path / "mine.jsonl"
    path.write_text("\n".join(json.dumps({"question": f"{i}?", "answer": f"so #### {i}"}) for i in range(60)))
    assert all(p.prompt.split("?")[0].endswith("\n" + p.answer) for p in draw(str(path)))
    path.write_text(path.read_text() + '\n{"question": "1?"}')
    with pytest.raises(BadInput, match=r"mine.jsonl, line 61: expected question, and answer"):
        draw(str(path))
    path.write_text(json.dumps({"question": "1?", "answer": "#### 1"}))
    with pytest.raises(BadInput, match="has no held-out problem, or nothing else"):
        draw(str(path))
    with pytest.raises(BadInput, match=r"nowhere\.jsonl cannot be read"):
        draw(str(tmp_path / "nowhere.jsonl"))


def test_a_task_that_the_small_vocabulary_cannot_spell_is_refused():
    with pytest.raises(BadInput, match=r"task 'made_up' has characters .* lacks \('.*A.*'\): name a pretrained model"):
        small.resolve("small", "made_up")
    assert small.resolve("owner/name", "made_up") == "owner/name"
