"""Tasks with one right answer each: prompts for the policy, and a reward that compares token ids.

A task's answer is unique, so a policy's exact pass rate at temperature 1 is the probability it gives that one answer
(`model.pass_probability`), free of sampling noise. One prompt in ten is held out, chosen by a hash of the prompt
itself: whoever draws it, in whatever order, it is on the same side.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b

from numpy.random import Generator

from sandbox.errors import BadInput

ONE_IN = 10  # prompts held out


@dataclass(frozen=True)
class Problem:
    """One prompt and its only right answer, both as text; the response must end with eos after the answer."""

    prompt: str
    answer: str


@dataclass(frozen=True)
class Task:
    """A family of problems.

    Args:
        name: key in TASKS.
        answer_characters: what an answer is made of; supervised training draws its corrupted characters from here.
        draw: one problem from a random generator.
    """

    name: str
    answer_characters: str
    draw: Callable[[Generator], Problem]

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
    """The task of that name. Raises BadInput where there is none."""
    if name not in TASKS:
        raise BadInput(f"task {name!r} is unknown, expected one of: {', '.join(TASKS)}")
    return TASKS[name]


def _sort8(rng: Generator) -> Problem:
    digits = "".join(map(str, rng.integers(0, 10, 8)))
    return Problem(prompt=digits + ">", answer="".join(sorted(digits)))


TASKS = {"sort8": Task("sort8", "0123456789", _sort8)}
