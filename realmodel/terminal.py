"""What the commands share: run folders, progress, tables for people or one JSON object, a clean standard output."""

import logging
import os
import shutil
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from sandbox.errors import BadInput
from sandbox.output import report, run_folder

NEEDED_MB = 300  # of disk for a run folder and the cached small model
PIPE_WIDTH = 120  # columns, where standard output is no terminal
TEXT = 32  # a cell longer than this is prose and is wrapped


def new_folder(out: Path | None, name: str) -> Path:
    """The run folder to make, refused before any work where it holds something or its disk is full."""
    folder = out or Path("runs") / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    try:
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise BadInput(f"run folder {folder} is not empty; a run is never overwritten: choose another --out")
        existing = next(parent for parent in (folder.absolute(), *folder.absolute().parents) if parent.exists())
    except OSError as error:
        raise BadInput(f"run folder {folder} cannot be made: {error.strerror}") from error
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        raise BadInput(f"run folder {folder} cannot be made: {existing} is not a folder that can be written to")
    free = shutil.disk_usage(existing).free / 1e6
    if free < NEEDED_MB:
        raise BadInput(f"run folder {folder}: {free:.0f} MB free, {NEEDED_MB} MB needed")
    return folder


def resumed(resume: bool, out: Path | None, name: str) -> Path:
    """The folder to go on with, or `new_folder`."""
    if resume and out is None:
        raise BadInput("--resume needs --out, the folder to go on with")
    return out if resume and out is not None else new_folder(out, name)


@contextmanager
def quiet_stdout() -> Iterator[Any]:
    """The real standard output; what anything else writes to file descriptor 1 meanwhile goes to standard error."""
    sys.stdout.flush()
    with os.fdopen(os.dup(1), "w") as real:
        os.dup2(2, 1)
        try:
            yield real
        finally:
            real.flush()
            sys.stdout.flush()
            os.dup2(real.fileno(), 1)


@contextmanager
def beside_engine() -> Iterator[tuple[Any, Progress]]:
    """The real standard output and a progress bar, while an engine and its libraries print what they like.

    No warnings of theirs about kernels that this machine does not have.
    """
    with quiet_stdout() as stdout, progress_bar() as bar:
        logging.getLogger("torch._library.triton").setLevel(logging.ERROR)
        yield stdout, bar


def progress_bar() -> Progress:
    columns = (
        TextColumn("{task.description:<44}"),
        BarColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    return Progress(*columns, console=Console(stderr=True))


def show(stdout: Any, outcome: dict, as_json: bool, tables: Mapping[str, Sequence[dict[str, Any]]]) -> None:
    """One JSON object, or a table for each title: a dict a row. A table wider than the page is split by columns."""
    if as_json:
        stdout.write(run_folder.to_json(outcome) + "\n")
        return
    console = Console(file=stdout, width=None if stdout.isatty() else PIPE_WIDTH, markup=False)
    for title, rows in tables.items():
        console.print(title, style="italic")
        rows = report.aligned(rows)
        least, most = _widths(rows)
        for names in _parts(least, console.width):
            table = Table()
            spare = console.width - 1 - sum(3 + least[name] for name in names)
            wide = [name for name in names if most[name] > least[name]]
            for name in names:
                width = min(most[name], least[name] + spare // len(wide)) if name in wide else least[name]
                justify = "left" if isinstance(rows[0][name], str) else "right"
                table.add_column(report.heading(name), justify=justify, width=width)
            for row in rows:
                table.add_row(*(report.cell(row[name]) for name in names))
            console.print(table)


def _widths(rows: Sequence[dict[str, Any]]) -> tuple[dict[str, int], dict[str, int]]:
    """Characters that each column needs, prose wrapped at TEXT, and those with which nothing is wrapped."""
    least, most = {}, {}
    for name in rows[0]:
        longest, words = max(len(report.cell(row[name])) for row in rows), report.heading(name).split()
        least[name] = max(min(longest, TEXT), *map(len, words))
        most[name] = max(longest, len(report.heading(name)))
    return least, most


def _parts(needed: Mapping[str, int], width: int) -> list[list[str]]:
    """Columns in tables that fit: each has the first one, and as many of the others, in order, as it can."""
    first, *others = needed
    parts = [[first]]
    for name in others:
        if len(parts[-1]) > 1 and 1 + sum(3 + needed[n] for n in (*parts[-1], name)) > width:
            parts.append([first])
        parts[-1].append(name)
    return parts
