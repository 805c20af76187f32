"""Parquet and JSON lines with named columns, read in pieces into `Table`s: the canonical table, or one mapped to it.

Parquet is decoded a group of rows at a time; JSON lines a line at a time, by msgspec into a typed row, so that columns
nobody asked for are skipped and a value of another type is an error of its row. Lines that strict JSON does not allow
(NaN, -Infinity) are read by the standard library. A row that cannot be read is refused and counted, never fatal.
"""

import hashlib
import json
import os
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import polars as pl

from sandbox.diagnosis.rollouts import COLUMNS, NAMES, RAGGED, SCALARS, TOPS, Ragged, Refused, Table
from sandbox.errors import BadInput

TOKENS = 2**18  # of one piece of a JSON file, about
PIECE, ROWS = 2**24, 2**13  # bytes of a piece of a Parquet file, about, and rows at most

Numbers = list[float | None] | None
EITHER = ("version_rollout", "advantage")  # one number a row or one a token
TYPES: dict[str, Any] = (
    dict.fromkeys(RAGGED, Numbers)
    | {"mask": list[bool | float | None] | None}
    | dict.fromkeys(TOPS, list[list[float]] | None)
    | dict.fromkeys(SCALARS, float | None)
    | dict.fromkeys(EITHER, float | list[float | None] | None)
    | {"reward": float | bool | None}
    | dict.fromkeys(NAMES, str | int | float | None)
)


class Unreadable(BadInput):
    """A file of which nothing (more) can be read; `reason` is one of rollouts.REASONS."""

    def __init__(self, reason: str, message: str):
        super().__init__(message)
        self.reason = reason


@dataclass(frozen=True)
class JsonFormat:
    """How one framework writes a response as a line of JSON.

    Args:
        name: of `--format`.
        marks: keys that tell it from other formats.
        row: msgspec type of a line; other keys are skipped.
        canonical: a row and its file's name -> values by canonical column. Raises ValueError with the reason
            for a row that does not fit.
    """

    name: str
    marks: frozenset[str]
    row: type
    canonical: Callable[[Any, str], dict[str, Any]]


def canonical_json(names: Mapping[str, str]) -> JsonFormat:
    """The canonical table as JSON lines, its columns under other names (canonical -> theirs) where given."""
    row = msgspec.defstruct("Row", [(name, TYPES[name], None) for name in COLUMNS], rename=dict(names))

    def values(line: Any, source: str) -> dict[str, Any]:
        return {name: getattr(line, name) for name in COLUMNS}

    return JsonFormat("canonical", frozenset({names.get("logp_rollout", "logp_rollout")}), row, values)


def check_names(names: Mapping[str, str]) -> None:
    """Raises BadInput for a --map of columns that the canonical table does not have, or of one column twice."""
    for name in names:
        if name not in COLUMNS:
            raise BadInput(f"map: {name!r} is no column of the canonical table; it has {', '.join(COLUMNS)}")
    theirs = list(names.values())
    for name in theirs:
        if theirs.count(name) > 1:
            raise BadInput(f"map: column {name!r} is mapped twice")


def check_there(names: Mapping[str, str], columns: Collection[str], source: str) -> None:
    """Raises BadInput for a --map of a column that the file does not have."""
    for name, theirs in names.items():
        if theirs not in columns:
            told = ", ".join(sorted(columns)[:20])
            raise BadInput(f"map: {source} has no column {theirs!r} for {name}; it has {told}")


def table_of(source: str, rows: np.ndarray, values: list[dict[str, Any]], refused: list[Refused]) -> Table:
    """A Table of rows given as canonical values by name, lists of numbers for ragged columns. rows (n,)"""
    ragged, scalars = {}, {}
    names = {name for row in values for name in row}
    for name in names & {*RAGGED, *EITHER}:
        column = [row.get(name) for row in values]
        lists = [value if isinstance(value, list | np.ndarray) else None for value in column]
        if any(value is not None for value in lists):
            ragged[name] = Ragged.of(lists)
        if name in EITHER:
            column = [None if isinstance(value, list | np.ndarray) else value for value in column]
            scalars[name] = np.array(column, float)
    for name in names & {*TOPS}:
        lists = [None if row.get(name) is None else [x for token in row[name] for x in token] for row in values]
        if any(value is not None for value in lists):
            ragged[name] = Ragged.of(lists)
    for name in names & {*SCALARS} - {*EITHER}:
        scalars[name] = np.array([row.get(name) for row in values], float)
    return Table(
        source, rows, ragged, scalars, {name: [r.get(name) for r in values] for name in names & {*NAMES}}, refused
    )


def read_json(path: Path, layout: JsonFormat, source: str) -> Iterator[Table]:
    """The lines of a file in pieces of about TOKENS tokens. Raises OSError."""
    decode = msgspec.json.Decoder(layout.row).decode
    values: list[dict[str, Any]] = []
    rows: list[int] = []
    refused: list[Refused] = []
    tokens = 0
    with path.open("rb") as file:
        for number, line in enumerate(line for line in file if not line.isspace()):
            try:
                row = layout.canonical(_decoded(line, decode, layout.row), source)
            except ValueError as error:  # also of msgspec
                refused.append(_unreadable(f"{source}:{number + 1}", line, error))
                continue
            values.append(row)
            rows.append(number)
            tokens += len(row["logp_rollout"] or ())
            if tokens >= TOKENS or len(refused) >= TOKENS:
                yield table_of(source, np.array(rows), values, refused)
                values, rows, refused, tokens = [], [], [], 0
    yield table_of(source, np.array(rows, np.int64), values, refused)


def _decoded(line: bytes, decode: Callable[[bytes], Any], row: type) -> Any:
    try:
        return decode(line)
    except msgspec.ValidationError:
        raise
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    except ValueError:  # strict JSON has no NaN and no -Infinity
        return msgspec.convert(json.loads(line), row)


def _unreadable(name: str, line: bytes, error: Exception) -> Refused:
    if isinstance(error, json.JSONDecodeError | UnicodeDecodeError):
        reason = "unreadable_row" if line.endswith(b"\n") else "truncated_file"
        return Refused(name, reason, detail=str(error))
    return Refused(name, "mixed_schema", detail=str(error))


def first_keys(path: Path, lines: int = 100) -> Iterator[set[str]]:
    """Keys of the first lines that are JSON objects. Raises OSError."""
    with path.open("rb") as file:
        for _, line in zip(range(lines), file, strict=False):
            try:
                value = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if isinstance(value, dict):
                yield set(value)


def read_parquet(path: Path, names: Mapping[str, str], source: str) -> Iterator[Table]:
    """The rows of a file in pieces; the rows after damage are refused.

    Raises Unreadable: the file does not even say its columns and how many rows it has.
    """
    wanted = {names.get(name, name): name for name in COLUMNS}
    with _polars_errors(source):
        frame = pl.scan_parquet(path, glob=False)
        theirs = [name for name in frame.collect_schema().names() if name in wanted]
        height = frame.select(pl.len()).collect().item()
    check_there(names, frame.collect_schema().names(), source)
    if not {names.get(name, name) for name in ("logp_rollout", "logp_train", "logp_old")} & {*theirs}:
        columns = ", ".join(frame.collect_schema().names()[:20])
        raise Unreadable("mixed_schema", f"{source} holds no log-probabilities under a known name; it has {columns}")
    rows = min(ROWS, max(1, int(PIECE * height / path.stat().st_size)))
    first, told = 0, "the rows are fewer than the file says"
    try:
        with _polars_errors(source):
            frame = frame.select(theirs).rename({name: wanted[name] for name in theirs})
            pieces = frame.collect_batches(chunk_size=rows, maintain_order=True)
        while first < height:
            with _polars_errors(source):
                piece = next(pieces, None)
            if piece is None:
                break
            yield _table_of_frame(piece, source, first)
            first += piece.height
    except Unreadable as error:
        told = str(error)
    if first < height:
        lost = [Refused(f"{source}:{row + 1}", "truncated_file", detail=told) for row in range(first, height)]
        yield Table(source, np.zeros(0, np.int64), {}, {}, {}, lost)


@contextmanager
def _polars_errors(source: str) -> Iterator[None]:
    """Damage can make polars panic, and its threads then write a stack to standard error themselves: not in here."""
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    except (pl.exceptions.PolarsError, pl.exceptions.PanicException) as error:
        raise Unreadable("truncated_file", f"{source}: not a whole Parquet file: {first_line(error)}") from error
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


def _table_of_frame(frame: pl.DataFrame, source: str, first: int) -> Table:
    ragged, scalars, names = {}, {}, {}
    rows = np.arange(first, first + frame.height)
    for column in frame:
        name, kind = column.name, column.dtype
        if isinstance(kind, pl.Array):
            column, kind = column.cast(pl.List(kind.inner)), pl.List(kind.inner)
        if kind == pl.Null:
            continue
        if name in NAMES and not kind.is_nested():
            names[name] = column.cast(pl.String).to_list()
        elif isinstance(kind, pl.List) and _is_number(kind.inner) and name in {*RAGGED, *EITHER}:
            ragged[name] = _ragged(column)
        elif name in TOPS and isinstance(kind, pl.List) and isinstance(kind.inner, pl.List):
            counts = column.list.eval(pl.element().list.len()).list.sum().cast(pl.Int64).fill_null(-1)
            values = _ragged(column.explode(empty_as_null=False)).flat
            ragged[name] = Ragged(values, counts.to_numpy())
        elif _is_number(kind) and name in {*SCALARS, *EITHER}:
            scalars[name] = column.cast(pl.Float64).fill_null(np.nan).to_numpy()
        else:
            wrong = [Refused(f"{source}:{row + 1}", "mixed_schema", detail=f"{name} is {kind}") for row in rows]
            return Table(source, rows[:0], {}, {}, {}, wrong)
    return Table(source, rows, ragged, scalars, names)


def _is_number(kind: Any) -> bool:
    return kind.is_integer() or kind.is_float() or kind in (pl.Boolean, pl.Null)  # a list of nulls has no other type


def _ragged(column: pl.Series) -> Ragged:
    lengths = column.list.len().cast(pl.Int64).fill_null(-1)
    flat = column.drop_nulls().explode(empty_as_null=False)
    null = flat.is_null().to_numpy() if flat.null_count() else None
    return Ragged(flat.cast(pl.Float64).fill_null(np.nan).to_numpy(), lengths.to_numpy(), null)


def digest(ids: Any) -> str | None:
    """A name for a list of token ids, the same for the same ids; None for none."""
    if ids is None or len(ids) == 0:
        return None
    return hashlib.blake2b(np.array(ids, float).tobytes(), digest_size=8).hexdigest()


def first_line(error: BaseException) -> str:
    """The first line of what an error says."""
    return (str(error) or type(error).__name__).splitlines()[0]
