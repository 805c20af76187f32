"""Dumps of public frameworks, and our own runs, as pieces of the canonical rollout table.

`read` finds the files of a folder, tells their formats by content and yields one `Chunk` after another. What each
format says and does not say (checked against the frameworks' sources of August 2026):

* NeMo-RL, train_data_step*.jsonl: whole padded sequences; prev_logprobs is the trainer before the update. No versions.
* prime-rl, token_exports/step_*/rank_*.jsonl: whole sequences; the trainer while it updates. No versions; what was not
  finite is null.
* slime and miles, debug train data .pt: see `torch_dumps`.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from sandbox.diagnosis import dumps, refusals
from sandbox.diagnosis.dumps import JsonFormat, Numbers
from sandbox.diagnosis.rollouts import Chunk, Refused, Table
from sandbox.errors import BadInput

Nested = list[list[bool | float | None] | bool | float | None] | None  # NeMo-RL writes batches of one: [[...]]
SUFFIXES = (".parquet", ".jsonl", ".json", ".pt", ".pth", ".pkl", ".pickle")
# Where the log-probabilities of both engines are, in folders that also hold dumps of one: prime-rl's, slime's, ours.
PARTS = ("token_exports", "train_data", "rollouts")
PARQUET = b"PAR1"
PICKLES = (b"PK\x03\x04", b"\x80")  # torch.save writes a zip; older ones, and plain pickles, start with a protocol mark
FORMATS = ("canonical", "nemo-rl", "prime-rl", "slime", "miles")


class NemoRow(msgspec.Struct):
    """A response as NeMo-RL logs it."""

    generation_logprobs: Nested = None
    prev_logprobs: Nested = None
    token_loss_mask: Nested = None
    token_ids: Nested = None
    advantages: list[list[float | None] | float | None] | float | None = None
    sample_loss_mask: list[float] | float | None = None
    input_lengths: list[int] | int | None = None
    rewards: list[float | None] | float | None = None
    idx: int | None = None


class PrimeRow(msgspec.Struct):
    """A response as prime-rl logs it."""

    inference_logprobs: Numbers = None
    trainer_logprobs: Numbers = None
    loss_mask: list[bool | float | None] | None = None
    token_ids: Numbers = None
    advantages: Numbers = None
    entropy: Numbers = None
    step: int | None = None
    rank: int | None = None
    export_sequence_idx: int | None = None


def nemo(row: NemoRow, source: str) -> dict[str, Any]:
    """NeMo-RL: padding cut off, the sample's mask multiplied into the tokens', the step from the file's name."""
    names = ("generation_logprobs", "prev_logprobs", "token_loss_mask", "token_ids", "advantages")
    q, prev, mask, ids, advantage = (_only(name, getattr(row, name)) for name in names)
    length, sample_mask, reward = (_first(getattr(row, n)) for n in ("input_lengths", "sample_loss_mask", "rewards"))
    if length is not None:
        if q is not None and not 0 <= length <= len(q):
            raise ValueError(f"input_lengths is {length} of {len(q)} tokens")
        q, prev, mask, ids = (None if v is None else v[:length] for v in (q, prev, mask, ids))
        advantage = advantage[:length] if isinstance(advantage, list) else advantage
    if isinstance(advantage, list) and len(advantage) == 1:
        advantage = advantage[0]
    if sample_mask is not None and mask is not None and sample_mask != 1:
        mask = [None if m is None else m * sample_mask for m in mask]
    step = re.search(r"step(\d+)", Path(source).name)
    return {
        "logp_rollout": q,
        "logp_train": prev,
        "logp_old": prev,
        "mask": mask,
        "token_ids": ids,
        "advantage": advantage,
        "reward": reward,
        "step": int(step[1]) if step else None,
        "sample_id": f"{step[1]}:{row.idx}" if step and row.idx is not None else None,
        "prompt_id": prompt(ids, mask),
    }


def prime(row: PrimeRow, source: str) -> dict[str, Any]:
    """prime-rl: a null stands for a number that was not finite, which a counted token cannot have."""
    index = row.export_sequence_idx
    return {
        "logp_rollout": _null_as_nan(row.inference_logprobs),
        "logp_train": _null_as_nan(row.trainer_logprobs),
        "mask": row.loss_mask,
        "token_ids": row.token_ids,
        "advantage": row.advantages,
        "entropy": row.entropy,
        "step": row.step,
        "rank": row.rank,
        "sample_id": None if index is None or row.rank is None else f"{row.step}:{row.rank}:{index}",
        "prompt_id": prompt(row.token_ids, row.loss_mask),
    }


NEMO = JsonFormat("nemo-rl", frozenset({"generation_logprobs", "prev_logprobs"}), NemoRow, nemo)
PRIME = JsonFormat("prime-rl", frozenset({"inference_logprobs", "trainer_logprobs"}), PrimeRow, prime)


def prompt(ids: Any, mask: Any) -> str | None:
    """A name for the tokens before the first counted one, the same for the same prompt; None where there are none."""
    if ids is None or mask is None or len(ids) != len(mask):
        return None
    return dumps.digest(ids[: next((i for i, m in enumerate(mask) if m), 0)])


def read(
    paths: Iterable[Path],
    format: str | None = None,
    map: Mapping[str, str] | None = None,
    lag: int | None = None,
    trust_pickle: bool = False,
) -> Iterator[Chunk]:
    """The usable rows of dumps, a piece at a time, and what was left out and why.

    Args:
        paths: files, and folders: a run folder, a folder of token exports, or any folder of dump files.
        format: one of FORMATS; None tells it from the content of each file.
        map: canonical column -> its name in the file, for the canonical format.
        lag: version_train - version_rollout of every row, in place of what the dumps say.
        trust_pickle: open files of torch that could run code.

    Raises BadInput: nothing can be read at all: no file, an unknown format or column, or every file refused.
    """
    names = map or {}
    dumps.check_names(names)
    if format is not None and format not in FORMATS:
        raise BadInput(f"format is {format!r}, expected one of {', '.join(FORMATS)}")
    if names and format not in (None, "canonical"):
        raise BadInput(f"map: columns of format {format} have fixed names; --map is for other Parquet and JSON lines")
    seen: set = set()
    refused, rows = [], 0
    for path in _files(paths):
        try:
            for table in _tables(path, "canonical" if names else format, names, trust_pickle):
                chunk = refusals.check(table, seen, lag)
                rows += chunk.n_rows
                yield chunk
        except (BadInput, OSError) as error:
            reason = "truncated_file" if isinstance(error, OSError) else getattr(error, "reason", "mixed_schema")
            message = str(error) if isinstance(error, BadInput) else f"{path}: {error.strerror}"
            refused.append(Refused(str(path), reason, detail=message))
    if refused and not rows:
        raise BadInput(refused[0].detail)
    if refused:
        yield Chunk(refusals.check(EMPTY, seen).rollouts, refused, 0)


EMPTY = Table("", np.zeros(0, np.int64), {}, {}, {})


def _files(paths: Iterable[Path]) -> Iterator[Path]:
    for path in paths:
        if not path.exists():
            raise BadInput(f"{path} does not exist")
        if not path.is_dir():
            yield path
            continue
        within = next((path / part for part in PARTS if (path / part).is_dir()), path)
        found = [file for file in within.rglob("*") if file.suffix in SUFFIXES and not file.name.startswith(".")]
        if not found:
            raise BadInput(f"{path} holds no dump: no file that ends in {', '.join(SUFFIXES)}")
        yield from sorted(found, key=_by_number)


def _by_number(path: Path) -> list[tuple[int, str]]:
    """step_10 after step_9."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", str(path))]


def _tables(path: Path, format: str | None, names: Mapping[str, str], trust_pickle: bool) -> Iterator[Table]:
    with path.open("rb") as file:
        start = file.read(4)
    if start == PARQUET:
        if format not in (None, "canonical"):
            raise dumps.Unreadable("mixed_schema", f"{path} is Parquet, which {format} does not write")
        return dumps.read_parquet(path, names, str(path))
    if start.startswith(PICKLES):
        if format not in (None, "slime", "miles"):
            raise dumps.Unreadable("mixed_schema", f"{path} is a file of torch, which {format} does not write")
        from realmodel.dumps import torch_dumps  # torch takes seconds to import, and only these files need it

        return torch_dumps.read(path, trust_pickle)
    return dumps.read_json(path, _json_format(path, format, names), str(path))


def _json_format(path: Path, format: str | None, names: Mapping[str, str]) -> JsonFormat:
    known = {"canonical": dumps.canonical_json(names), "nemo-rl": NEMO, "prime-rl": PRIME}
    if format is not None:
        if format not in known:
            raise dumps.Unreadable("mixed_schema", f"{path} is no file of torch, which {format} writes")
        if names:
            dumps.check_there(names, set().union(*dumps.first_keys(path)), str(path))
        return known[format]
    seen: set[str] = set()
    for keys in dumps.first_keys(path):
        seen |= keys
        for layout in known.values():
            if layout.marks & keys:
                return layout
    if not seen:
        raise dumps.Unreadable("truncated_file", f"{path} is neither Parquet nor JSON lines nor a file of torch")
    columns = ", ".join(sorted(seen)[:20])
    raise dumps.Unreadable(
        "mixed_schema",
        f"{path} holds no log-probabilities under a known name; it has {columns}: say --map logp_rollout=THEIRS",
    )


def _only(name: str, value: Any) -> Any:
    """The sequence of a batch of one, [[...]], or of [...]."""
    if not isinstance(value, list):
        return value
    if len(value) == 1 and isinstance(value[0], list):
        return value[0]
    if any(isinstance(item, list) for item in value):
        raise ValueError(f"{name} holds {len(value)} sequences, expected one")
    return value


def _first(value: Any) -> Any:
    if isinstance(value, list):
        return value[0] if value else None
    return value


def _null_as_nan(values: list[float | None] | None) -> list[float | None] | None:
    if values is None or None not in values:
        return values
    return [np.nan if value is None else value for value in values]
