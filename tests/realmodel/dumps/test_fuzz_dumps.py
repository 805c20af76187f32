"""Fuzz: whatever is done to a dump, one clear line, or a diagnosis whose rows add up."""

import json
import random
from collections import Counter
from pathlib import Path

import polars as pl
import pytest
import torch

from realmodel.dumps import diagnosis
from realmodel.dumps.readers import read
from sandbox.diagnosis.diagnose import diagnose
from sandbox.errors import BadInput
from sandbox.output import run_folder
from tests.realmodel.dumps.test_readers import check_counts
from tests.support.dump_files import WRITERS, canonical_rows, responses, save, write_lines


def mutated(content: bytes, rng: random.Random) -> bytes:
    """A byte flipped, a stretch cut out or doubled or overwritten, or the end missing."""
    data = bytearray(content)
    for _ in range(rng.choice((1, 1, 1, 4, 16))):
        if not data:
            break
        a = rng.randrange(len(data))
        b = min(len(data), a + rng.choice((1, 2, 8, 64)))
        match rng.randrange(5):
            case 0:
                data[a] ^= 1 << rng.randrange(8)
            case 1:
                del data[a:b]
            case 2:
                data[a:a] = data[a:b]
            case 3:
                data[a:b] = rng.randbytes(b - a)
            case 4 if rng.random() < 0.3:
                del data[a:]
    return bytes(data)


VALUES = (
    None,
    True,
    0,
    1,
    -1,
    -9999,
    2.5,
    1e308,
    -1e308,
    float("nan"),
    float("-inf"),
    "x",
    "-0.5",
    [],
    [[]],
    [None],
    {},
)


def changed(value, rng: random.Random, depth: int = 0):
    """A value of a row with one field dropped, emptied, cut, lengthened or given another type."""
    if isinstance(value, dict) and value and depth < 3:
        key = rng.choice(list(value))
        if rng.random() < 0.2:
            return {k: v for k, v in value.items() if k != key}
        return value | {key: changed(value[key], rng, depth + 1)}
    if isinstance(value, list) and value and depth < 4:
        at = rng.randrange(len(value))
        match rng.randrange(4):
            case 0:
                return value[:at]
            case 1:
                return [*value, value[at]]
            case 2:
                return [*value[:at], changed(value[at], rng, depth + 1), *value[at + 1 :]]
    if torch.is_tensor(value) and value.ndim and rng.random() < 0.7:
        return rng.choice((value[:-1], value.double() * -1, value[None], value.repeat(2), value * float("nan")))
    return rng.choice(VALUES)


def damaged(name: str, rng: random.Random, folder: Path) -> tuple[Path, int | None]:
    """A mutated dump, and how many rows it has where that can be said."""
    path = WRITERS[name](folder, responses(rng.randrange(1, 6), seed=rng.randrange(99)))
    if rng.random() < 0.5:
        path.write_bytes(mutated(path.read_bytes(), rng))
        return path, sum(
            bool(line.strip()) for line in path.read_bytes().split(b"\n")
        ) if ".json" in path.name else None
    if path.suffix == ".pt":
        content = torch.load(path)
        for _ in range(rng.randrange(1, 4)):
            content = changed(content, rng)
        save(path, content)
        samples = content.get("samples") if isinstance(content, dict) else None
        known = isinstance(samples, list) and all(isinstance(sample, dict) for sample in samples)
        return path, len(samples) if known and samples else None
    lines = canonical_rows(responses(4)) if path.suffix == ".parquet" else path.read_text().splitlines()
    rows = [line if isinstance(line, dict) else json.loads(line) for line in lines]
    for _ in range(rng.randrange(1, 4)):
        at = rng.randrange(len(rows))
        rows[at] = changed(rows[at], rng)
    if path.suffix == ".parquet":
        try:
            pl.DataFrame(rows, infer_schema_length=None, strict=False).write_parquet(path)
        except (pl.exceptions.PolarsError, TypeError, ValueError, OverflowError, pl.exceptions.PanicException):
            return path, None  # no such table can be written; the sound one is still there
    else:
        write_lines(path, rows)
    return path, len(rows)


def fuzz(seeds: range, folder: Path) -> Counter:
    """What became of mutated dumps; a traceback or a row unaccounted for fails."""
    outcome: Counter = Counter()
    for seed in seeds:
        rng = random.Random(seed)
        name = list(WRITERS)[seed % len(WRITERS)]
        path, rows = damaged(name, rng, folder / f"{seed}")
        try:
            chunks = list(read([path]))
        except BadInput as error:
            outcome["refused"] += 1
            outcome["several lines"] += "\n" in str(error)
            continue
        for chunk in chunks:
            check_counts(chunk)
        assert rows is None or sum(chunk.n_rows for chunk in chunks) == rows, (seed, name)
        told = diagnose(chunks) if sum(chunk.n_rows for chunk in chunks) else {"refused": True}
        outcome["read"] += 1
        outcome["with reasons"] += bool(told["refused"])
        if len(told) > 1:
            json.loads(run_folder.to_json(told))
            diagnosis.tables(told)
    return outcome


def test_fuzz(tmp_path: Path):
    outcome = fuzz(range(120), tmp_path)
    assert not outcome["several lines"]
    assert outcome["read"] > 40
    assert outcome["with reasons"] > 20


@pytest.mark.slow
def test_fuzz_two_thousand(tmp_path: Path):
    outcome = fuzz(range(1000, 3000), tmp_path)
    print(outcome)
    assert not outcome["several lines"]
    assert outcome["read"] + outcome["refused"] == 2000
