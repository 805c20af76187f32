"""Tasks: prompts for the policy, and a binary reward.

A problem without a `score` of its own has one right answer, and the reward compares token ids. The exact pass rate at
temperature 1 is then the probability of that answer (`model.pass_probability`), without sampling noise. Where a
verifier scores the text (reasoning-gym, math-verify), other responses pass too, so that probability is a lower bound.
A run then draws one response a problem instead. One prompt in ten is held out, chosen by a hash of the prompt, so it is
always on the same side.
"""

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from hashlib import blake2b
from pathlib import Path
from typing import Any

from numpy.random import Generator

from sandbox.errors import BadInput

ONE_IN = 10  # prompts held out
MADE_UP = Path(__file__).with_name("problems.jsonl")  # twenty problems of our own, in the format of GSM8K
PUBLIC = ("openai/gsm8k", "main/train-00000-of-00001.parquet")  # on the hub; held out is our tenth of it
LONGEST_SORT = 48  # digits
DATASET_SIZE = 2**31  # of reasoning-gym's, which are generated: an index is a seed
# What Qwen3's chat template makes of one question where enable_thinking is false.
QWEN3_CHAT = "<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"


@dataclass(frozen=True)
class Problem:
    """One prompt and its right answer, both as text.

    Args:
        score: of a response's text without its eos, given the right answer; 1.0 passes, anything below fails. None: the
            answer itself, token by token, is all that passes.
    """

    prompt: str
    answer: str
    score: Callable[[str, str], float] | None = None

    def reward(self, response_ids: Sequence[int], tokenizer: Any) -> float:
        """1.0 where the response ends with eos and passes, else 0.0: partial scores of a verifier count as none."""
        eos = tokenizer.eos_token_id
        if self.score is None:
            return reward(response_ids, tokenizer.encode(self.answer), eos)
        *ids, last = response_ids
        return float(last == eos and eos not in ids and self.score(tokenizer.decode(ids), self.answer) >= 1.0)


@dataclass(frozen=True)
class Task:
    """A family of problems.

    Args:
        name: key in TASKS.
        answer_characters: what an answer is made of; supervised training draws its corrupted characters from here.
        draw: one problem from a random generator.
        max_new_tokens: room for a response; 0: for the answer and eos.
        supervised_steps: that the small model needs before it is nearly always right when greedy.
        corruption: probability that supervised training replaces a character of an answer. It leaves a pass rate of .3
            to .55 at temperature 1.
    """

    name: str
    answer_characters: str
    draw: Callable[[Generator], Problem]
    max_new_tokens: int = 0
    supervised_steps: int = 300
    corruption: float = 0.1

    def sample(self, rng: Generator, n: int, held_out: bool) -> list[Problem]:
        """`n` problems, all from the held-out tenth of prompts or all from the rest."""
        problems = []
        while len(problems) < n:
            problem = self.draw(rng)
            if is_held_out(problem.prompt) == held_out:
                problems.append(problem)
        return problems


def is_held_out(prompt: str) -> bool:
    """Whether a prompt belongs to the held-out tenth: a fixed hash of its characters decides."""
    return int.from_bytes(blake2b(prompt.encode(), digest_size=8).digest()) % ONE_IN == 0


def reward(response_ids: Sequence[int], answer_ids: Sequence[int], eos_id: int) -> float:
    """1.0 where the response is the answer followed by eos and nothing else, else 0.0."""
    return float(list(response_ids) == [*answer_ids, eos_id])


def get(name: str) -> Task:
    """The task of that name: sortN, a key of TASKS, or the path of a .jsonl file in the format of GSM8K.

    Raises BadInput: where there is none, a file that is no such file, a package of the extra `tasks` that is missing.
    """
    if name.endswith(".jsonl"):
        return _gsm8k(name, lambda: _read_jsonl(Path(name)))
    if digits := re.fullmatch(r"sort(0|[1-9]\d*)", name):
        return _sort(int(digits[1]))
    if name not in TASKS:
        raise BadInput(f"task {name!r} is unknown, expected sortN (N from 1 to {LONGEST_SORT}), {', '.join(TASKS)}")
    return TASKS[name]


@cache
def _sort(n: int) -> Task:
    """sortN: put n digits in order. A response has n + 1 tokens, so n sets the response length.

    Supervised training is as long and as corrupted as the small model needs at that length.
    """
    if not 1 <= n <= LONGEST_SORT:
        raise BadInput(f"task 'sort{n}' is unknown, expected sortN with N from 1 to {LONGEST_SORT}")

    def draw(rng: Generator) -> Problem:
        digits = "".join(map(str, rng.integers(0, 10, n)))
        return Problem(prompt=digits + ">", answer="".join(sorted(digits)))

    steps = 300 + max(0, n - 8) * 25 // 2
    return Task(f"sort{n}", "0123456789", draw, supervised_steps=steps, corruption=min(0.1, 0.96 / n))


def _carry3(rng: Generator) -> Problem:
    """Prompts "821+977=". The answer works it out column by column from the right, "1+7+0=08,2+7+0=09,8+9+0=17,", the
    third number of a column the carry of the column before it, and then gives the sum, "1798"."""
    a, b = rng.integers(0, 1000, 2)
    columns, carry = "", 0
    for x, y in zip(f"{a:03d}"[::-1], f"{b:03d}"[::-1], strict=True):
        column = int(x) + int(y) + carry
        columns += f"{x}+{y}+{carry}={column:02d},"
        carry = column // 10
    return Problem(prompt=f"{a:03d}+{b:03d}=", answer=f"{columns}{a + b:04d}")


def _add2(rng: Generator) -> Problem:
    """Prompts "a+b=" of two numbers of up to two digits, filled with zeros; the answer has three."""
    a, b = rng.integers(0, 100, 2)
    return Problem(prompt=f"{a:02d}+{b:02d}=", answer=f"{a + b:03d}")


def _gym(name: str, answer_characters: str, **settings: int) -> Task:
    """A task of reasoning-gym in lower case, for the small model's vocabulary; its own score, thresholded at 1.0."""

    @cache
    def dataset() -> Any:
        try:
            import reasoning_gym
        except ImportError as error:
            raise BadInput(f"task {name!r} needs the package reasoning-gym (extra 'tasks')") from error
        return reasoning_gym.create_dataset(name, seed=0, size=DATASET_SIZE, **settings)

    def draw(rng: Generator) -> Problem:
        entry = dataset()[int(rng.integers(DATASET_SIZE))]
        return Problem(prompt=entry["question"].lower() + ">", answer=entry["answer"].lower(), score=score)

    def score(text: str, answer: str) -> float:
        return dataset().score_answer(text, {"answer": answer})

    return Task(name, answer_characters, draw)


def _gsm8k(name: str, read: Callable[[], list[dict[str, str]]]) -> Task:
    """Word problems with a number for an answer, in Qwen3's chat template, verified by math-verify."""

    @cache
    def problems() -> list[Problem]:
        rows = [
            Problem(
                QWEN3_CHAT.format(question=row["question"]), row["answer"].rpartition("####")[2].strip(), _same_number
            )
            for row in read()
        ]
        if {is_held_out(p.prompt) for p in rows} != {False, True}:
            raise BadInput(f"task {name!r} has no held-out problem, or nothing else: it needs more problems")
        return rows

    def draw(rng: Generator) -> Problem:
        return problems()[rng.integers(len(problems()))]

    return Task(name, "0123456789", draw, max_new_tokens=512)


def _same_number(text: str, answer: str) -> float:
    """Whether the last thing that a response calls its answer equals the right one as mathematics, not as text."""
    try:
        import math_verify
    except ImportError as error:
        raise BadInput("tasks in the format of GSM8K need the package math-verify (extra 'tasks')") from error
    # Its timeouts are signals, which the main thread alone may set; responses are short.
    parse: Any = math_verify.parse  # typed int, but None is how it documents "no timeout"
    gold = parse(answer.replace(",", ""), parsing_timeout=None)
    return float(math_verify.verify(gold, parse(text, parsing_timeout=None), timeout_seconds=None))


def _read_jsonl(path: Path) -> list[dict[str, str]]:
    """Rows with `question` and `answer`, whose number stands behind ####. BadInput names the line that has none."""
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(f"task file {path} cannot be read: {error}") from error
    rows = []
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
            good = isinstance(row["question"], str) and row["answer"].rpartition("####")[1] == "####"
        except (ValueError, TypeError, KeyError, AttributeError):
            good = False
        if not good:
            raise BadInput(
                f"task file {path}, line {number}: expected question, and answer with #### before its number"
            )
        rows.append(row)
    return rows


def _read_public() -> list[dict[str, str]]:
    import polars as pl

    try:
        from huggingface_hub import hf_hub_download

        return pl.read_parquet(hf_hub_download(*PUBLIC, repo_type="dataset")).to_dicts()
    except Exception as error:  # no hub, no network, another layout: as many kinds as there are layers
        reason = str(error).partition("\n")[0]
        raise BadInput(f"task 'gsm8k' cannot be had from the hub: {reason}; a .jsonl file will do") from error


TASKS = {
    task.name: task
    for task in (
        Task("add2", "0123456789", _add2, supervised_steps=900),
        Task("carry3", "0123456789+=,", _carry3, supervised_steps=900, corruption=0.028),
        _gym("spell_backward", "abcdefghijklmnopqrstuvwxyz", max_word_len=6),
        _gsm8k("made_up", lambda: _read_jsonl(MADE_UP)),
        _gsm8k("gsm8k", _read_public),
    )
}
