"""Dumps of public frameworks as rows of the canonical table. The format is told from the content of a file.

Files are untrusted: a .pt is read with weights_only, a pickle not at all unless the user says so. Lines and files that
cannot be read become `Refused`, and the rest is read.
"""

import json
import re
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from sandbox.errors import BadInput
from sandbox.rollouts import COLUMNS, MISSING, Refused

FORMATS = ("canonical", "nemo_rl", "prime_rl", "slime", "parquet", "jsonl")
ROWS = 512  # of a Parquet file at a time

Row = dict[str, Any]


def read(
    paths: Iterable[Path], format: str | None = None, columns: dict[str, str] | None = None, trust_pickle: bool = False
) -> Iterator[Row | Refused]:
    """Rows of all dumps, in order.

    Args:
        paths: files, or folders: of a run (its rollouts/*.parquet) or of dumps.
        format: one of FORMATS, instead of telling it from the content.
        columns: canonical name -> name in the file, for generic Parquet and JSON lines.
        trust_pickle: run whatever a pickle contains.
    Raises:
        BadInput: a path that does not exist, an unknown format or canonical column.
    """
    if format is not None and format not in FORMATS:
        raise BadInput(f"format is {format!r}, expected one of {', '.join(FORMATS)}")
    for name in columns or {}:
        if name not in COLUMNS:
            raise BadInput(f"map: {name!r} is no canonical column; they are {', '.join(COLUMNS)}")
    files = [file for path in paths for file in _files(path)]
    if not files:
        raise BadInput("dump: no file to read")
    for file in files:
        try:
            yield from _file(file, format, columns or {}, trust_pickle)
        except (pl.exceptions.PolarsError, OSError, ValueError, KeyError, EOFError) as error:
            if isinstance(error, BadInput):
                raise
            line = str(error).splitlines()[0][:200] if str(error) else type(error).__name__
            yield Refused(file.name, "unreadable", line)


def _files(path: Path) -> list[Path]:
    if not path.exists():
        raise BadInput(f"dump: {path} does not exist")
    if path.is_file():
        return [path]
    if (path / "rollouts").is_dir():
        return sorted((path / "rollouts").glob("*.parquet"))
    return sorted(f for f in path.rglob("*") if f.suffix in (".parquet", ".jsonl", ".pt"))


def _file(file: Path, format: str | None, columns: dict[str, str], trust_pickle: bool) -> Iterator[Row | Refused]:
    with file.open("rb") as opened:
        magic = opened.read(4)
    if not magic:
        yield Refused(file.name, "unreadable", "the file is empty")
    elif magic == b"PAR1":
        yield from _parquet(file, columns)
    elif magic[:2] == b"PK" or magic[:1] == b"\x80" or format == "slime":
        yield from _torch(file, trust_pickle)
    else:
        yield from _jsonl(file, format, columns)


def _parquet(file: Path, columns: dict[str, str]) -> Iterator[Row]:
    """Lists come as views of one numpy array per slice; nulls in them as MISSING."""
    frame = pl.scan_parquet(file)
    there = frame.collect_schema().names()
    names = {name: columns.get(name, name) for name in COLUMNS if columns.get(name, name) in there}
    for name, theirs in columns.items():
        if theirs not in there:
            raise BadInput(f"map: {file.name} has no column {theirs!r} for {name}")
    frame = frame.select([pl.col(theirs).alias(name) for name, theirs in names.items()])
    for part in frame.collect_batches(chunk_size=ROWS, maintain_order=True):
        for start in range(0, len(part), ROWS):
            piece = part.slice(start, ROWS)
            lists = {name: _views(piece[name]) for name in piece.columns}
            for values in zip(*lists.values(), strict=True):
                yield dict(zip(lists, values, strict=True))


def _views(column: pl.Series) -> list:
    dtype = column.dtype
    inner = dtype.inner if isinstance(dtype, pl.List) else None
    if inner is None or not (inner.is_numeric() or inner == pl.Boolean):
        return column.to_list()
    lengths = column.list.len()
    flat = column.filter(lengths.fill_null(0) > 0).explode().cast(pl.Float64)
    values = flat.fill_null(MISSING).to_numpy()
    ends = np.cumsum(lengths.fill_null(0).to_numpy().astype(np.int64))
    known = lengths.is_not_null().to_list()
    starts = np.concatenate([[0], ends[:-1]]) if len(ends) else ends
    return [values[a:b] if ok else None for a, b, ok in zip(starts, ends, known, strict=True)]


def _jsonl(file: Path, format: str | None, columns: dict[str, str]) -> Iterator[Row | Refused]:
    """One JSON object a line; NaN and Infinity are read. The keys of each line say whose it is."""
    found = re.search(r"step_?-?(\d+)", str(file.parent.name + "/" + file.name))
    step = int(found[1]) if found else None
    with file.open("rb") as opened:
        for number, line in enumerate(opened):
            if not line.strip():
                continue
            name = f"{file.name}:{number + 1}"
            try:
                row = json.loads(line)
            except (ValueError, RecursionError):
                yield Refused(name, "unreadable", "not a line of JSON")
                continue
            if not isinstance(row, dict):
                yield Refused(name, "malformed", f"{type(row).__name__}, expected a JSON object")
                continue
            try:
                if columns or format == "jsonl":
                    yield {k: v for k, v in row.items() if k in COLUMNS} | {c: row.get(k) for c, k in columns.items()}
                elif format == "nemo_rl" or "generation_logprobs" in row:
                    yield nemo_rl(row, step)
                elif format == "prime_rl" or "inference_logprobs" in row:
                    yield prime_rl(row, step)
                else:
                    yield row
            except (TypeError, ValueError, KeyError, AttributeError) as error:
                yield Refused(name, "malformed", f"{error}".splitlines()[0][:200] if str(error) else "malformed")


def nemo_rl(row: Row, step: int | None) -> Row:
    """A line of train_data_step{N}.jsonl: whole sequences, prompt and padding masked; prev_logprobs is "old"."""
    n = row.get("input_lengths")
    n = n[0] if isinstance(n, list) and n else n
    n = n if isinstance(n, int) else None
    sample = row.get("sample_loss_mask", 1)
    sample = sample[0] if isinstance(sample, list) and sample else sample
    mask = row.get("token_loss_mask")
    mask = mask[:n] if isinstance(mask, list) else mask
    old = _cut(row.get("prev_logprobs"), n)
    return {
        "step": step,
        "logp_rollout": _cut(row.get("generation_logprobs"), n),
        "logp_old": old,
        "logp_train": old,
        "mask": [0] * len(mask) if isinstance(mask, list) and not sample else mask,
        "token_ids": _cut(row.get("token_ids"), n),
        "reward": _scalar(row.get("rewards")),
        "advantage": _scalar(row.get("advantages")),
    }


def prime_rl(row: Row, step: int | None) -> Row:
    """A line of token_exports/step_{n}/rank_{r}.jsonl: trainer_logprobs are of the weights at that micro step."""
    where = ("micro_step", "micro_sequence_idx", "export_sequence_idx")
    return {
        "step": row.get("step", step),
        "rank": row.get("rank"),
        "sample_id": "/".join(str(row.get(name)) for name in where) if where[-1] in row else None,
        "logp_rollout": row.get("inference_logprobs"),
        "logp_train": row.get("trainer_logprobs"),
        "mask": row.get("loss_mask"),
        "token_ids": row.get("token_ids"),
        "advantage": row.get("advantages"),
    }


def _cut(values: Any, n: int | None) -> Any:
    return values[:n] if isinstance(values, list) else values


def _scalar(value: Any) -> Any:
    """A number, or the first that is not 0 of a list (prompts carry 0)."""
    return next((x for x in value if x), 0.0) if isinstance(value, list) else value


def _torch(file: Path, trust_pickle: bool) -> Iterator[Row | Refused]:
    """slime's and miles' debug train data: {"rollout_id", "rank", "samples": [...]} or columns of lists."""
    import torch

    if not zipfile.is_zipfile(file) and not trust_pickle:
        yield Refused(
            file.name,
            "unreadable",
            "a pickle, or a damaged .pt: loading a pickle runs what it contains (--trust-pickle)",
        )
        return
    try:
        data = torch.load(file, map_location="cpu", weights_only=not trust_pickle)
    except Exception as error:  # whatever a damaged archive makes of its reader
        why = "holds objects that only running it would load (--trust-pickle)" if "eights" in str(error) else "damaged"
        yield Refused(file.name, "unreadable", why)
        return
    if not isinstance(data, dict):
        yield Refused(file.name, "malformed", f"{type(data).__name__}, expected a dictionary")
        return
    samples = data.get("samples")
    if samples is None:
        table = data.get("rollout_data", data)
        lists = {k: v for k, v in table.items() if isinstance(v, list | tuple)} if isinstance(table, dict) else {}
        n = len(lists.get("rollout_log_probs", ()))
        samples = [{k: v[i] for k, v in lists.items() if len(v) == n} for i in range(n)]
    if not isinstance(samples, list):
        samples = []
    if not samples:
        yield Refused(file.name, "malformed", "no samples with rollout_log_probs")
    for number, sample in enumerate(samples):
        if isinstance(sample, dict):
            yield slime({k: _plain(v) for k, v in sample.items()}, data, number)
        else:
            yield Refused(f"{file.name}:{number}", "malformed", "a sample that is no dictionary")


def _plain(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else value


def slime(sample: Row, data: Row, number: int) -> Row:
    """A sample of slime (`log_probs` is the trainer's) or miles (`train_log_probs`, `old_log_probs`)."""
    versions = sample.get("weight_versions")
    if isinstance(versions, list):
        numbers = [int(v) if str(v).isdigit() else None for v in versions]
        versions = numbers[0] if len(set(numbers)) == 1 else None  # one a segment: tokens cannot be told apart
    old = sample.get("old_log_probs", sample.get("log_probs"))
    tokens, n = sample.get("tokens"), sample.get("response_length")
    return {
        "step": data.get("rollout_id"),
        "rank": data.get("rank"),
        "sample_id": sample.get("index", sample.get("sample_index", number)),
        "prompt_id": sample.get("group_index", number),
        "logp_rollout": sample.get("rollout_log_probs"),
        "logp_train": sample.get("train_log_probs", old),
        "logp_old": old,
        "mask": sample.get("loss_mask"),
        "token_ids": tokens[-n:] if isinstance(tokens, list) and isinstance(n, int) and 0 < n <= len(tokens) else None,
        "version_rollout": versions,
        "reward": sample.get("reward") if isinstance(sample.get("reward"), int | float) else None,
        "advantage": sample.get("advantages"),
    }
