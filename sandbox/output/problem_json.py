"""PROBLEM.json: a `problems.Case` as people write it down.

    transition           S x V integers: next state of each (state, token), -1 = episode ends
    reward               S x V, summed over the episode
    horizon              largest number of tokens, at least 1
    initial              state that every episode starts in; default 0
    logits               S x V, the trainer's weights
    sampler_logits       S x V, the weights the sampler holds; default logits
    sampler_log_offset   S x V, added to the sampler's log-probabilities before renormalising; default 0

Whatever is wrong with a file is a BadInput of one line that names the file, the field and the index.
"""

import json
import reprlib
from pathlib import Path
from typing import Any

import numpy as np

from sandbox.errors import BadInput
from sandbox.output.run_folder import write_json
from sandbox.tabular.problems import PRESETS, Case, Problem

REQUIRED = ("transition", "reward", "horizon", "logits")
OPTIONAL = ("initial", "sampler_logits", "sampler_log_offset")
MOST_STEPS = 2**20
MOST_VISITS = 2**25  # states times horizon: 256 MB for each table of the recursions


def named(source: str | Path) -> Case:
    """The preset of that name, where there is no such file; else the file's case. Raises BadInput."""
    if str(source) in PRESETS and not Path(source).exists():
        return PRESETS[str(source)]()
    return load(Path(source))


def load(path: Path) -> Case:
    """Raises BadInput, naming the path, for a file that is missing, is not JSON, or holds anything but a case."""
    try:
        try:
            text = path.read_bytes().decode()
        except FileNotFoundError as error:
            raise BadInput(f"no such file, nor a preset ({', '.join(PRESETS)})") from error
        except (OSError, ValueError) as error:  # a folder, no permission, not UTF-8, a path that cannot be
            raise BadInput(f"cannot be read: {error}") from error
        return loads(text)
    except BadInput as error:
        raise BadInput(f"{path}: {error}") from error


def loads(text: str) -> Case:
    """The case that a JSON text describes. Raises BadInput."""
    try:
        fields = json.loads(text, object_pairs_hook=_without_repeats)
    except BadInput:
        raise
    except RecursionError as error:
        raise BadInput("is not JSON: nested too deeply") from error
    except ValueError as error:  # bad syntax, or an integer of more digits than Python reads
        raise BadInput(f"is not JSON: {error}") from error
    if not isinstance(fields, dict):
        raise BadInput(f"is not a JSON object but {reprlib.repr(fields)}")
    known = (*REQUIRED, *OPTIONAL)
    for name in fields:
        if name not in known:
            raise BadInput(f"unknown key {reprlib.repr(name)}, known: {', '.join(known)}")
    for name in REQUIRED:
        if name not in fields:
            raise BadInput(f"{name} is missing")
    problem = Problem(fields["transition"], fields["reward"], fields["horizon"], fields.get("initial", 0))
    states = problem.shape[0]
    most = min(MOST_STEPS, MOST_VISITS // states)
    if problem.horizon > most:
        raise BadInput(f"horizon is {reprlib.repr(problem.horizon)}, expected at most {most} with {states} states")
    logits = fields["logits"]
    offset = fields.get("sampler_log_offset", np.zeros(problem.shape))
    return Case(problem, logits, fields.get("sampler_logits", logits), offset)


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        names = [name for name, _ in pairs]
        raise BadInput(f"{reprlib.repr(next(n for n in names if names.count(n) > 1))} appears twice")
    return fields


def save(path: Path, case: Case) -> None:
    """Write a file that `load` reads back to the last bit. Raises BadInput where it cannot be written."""
    problem = case.problem
    write_json(
        path,
        {
            "transition": problem.transition,
            "reward": problem.reward,
            "horizon": problem.horizon,
            "initial": problem.initial,
            "logits": case.logits,
            "sampler_logits": case.sampler_logits,
            "sampler_log_offset": case.sampler_log_offset,
        },
    )
