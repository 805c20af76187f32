"""What a user sees who types something wrong: one line on standard error, exit status 2, nothing left behind."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

MISMATCH = Path(sys.executable).with_name("mismatch")


def mismatch(*arguments: str | Path, cwd: Path) -> subprocess.CompletedProcess:
    return subprocess.run([MISMATCH, *map(str, arguments)], cwd=cwd, capture_output=True, text=True, timeout=120)


def refused(done: subprocess.CompletedProcess) -> str:
    assert done.returncode == 2
    assert done.stdout == ""
    lines = [line for line in done.stderr.splitlines() if line.startswith("mismatch: ")]
    assert len(lines) == 1, done.stderr
    assert "Traceback" not in done.stderr
    return lines[0]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("sede = 1", "extra fields found (sede)"),
        ('correction = "dlcc"', "unknown correction 'dlcc', known: none, "),
        ('model = "/nowhere/qwen"', "model '/nowhere/qwen' is no folder"),
        ('task = "sort9"', "task 'sort9' is unknown"),
        ('model = "broken"', "model 'broken' has no config.json"),
        ('[engine]\ndtype = "int4"', "'int4' is none of 'float32', 'bfloat16', 'float16' at engine.dtype"),
        ("prompts = 0", "prompts is 0, expected at least 1"),
        ("seed = -1", "seed is -1, expected at least 0"),
        ("betas = [2.0, 3.0]", "betas is [2.0, 3.0], expected two numbers from 0 to below 1"),
        ("[engine]\nmax_model_len = 1", "engine.max_model_len is 1, expected at least 2"),
        ("learning_rate = -1e-4", "learning_rate is -0.0001, expected"),
    ],
)
def test_bad_configs(tmp_path: Path, text: str, message: str):
    (tmp_path / "run.toml").write_text(text)
    (tmp_path / "broken").mkdir()
    assert message in refused(mismatch("train", "run.toml", "--out", "out", "--json", cwd=tmp_path))
    assert not (tmp_path / "out").exists()


def test_an_existing_run_folder_is_not_touched(tmp_path: Path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "steps.parquet").write_text("precious")
    message = refused(mismatch("demo", "--fast", "--out", "out", cwd=tmp_path))
    assert "run folder out is not empty" in message
    assert (tmp_path / "out" / "steps.parquet").read_text() == "precious"


def test_a_folder_that_cannot_be_made_is_refused_at_once(tmp_path: Path):
    (tmp_path / "file").write_text("x")
    message = refused(mismatch("demo", "--out", "file/out", cwd=tmp_path))
    assert "run folder file/out cannot be made" in message
    assert "cannot be made: File name too long" in refused(mismatch("demo", "--out", "a" * 300, cwd=tmp_path))


def test_output_that_goes_nowhere(tmp_path: Path):
    with Path("/dev/full").open("w") as full:
        done = subprocess.run([MISMATCH, "exact", "bandit", "--json"], stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 2
    assert "No space left on device" in done.stderr
    assert "Traceback" not in done.stderr


def test_no_space(tmp_path: Path):
    """A file system of 1 MiB, where the machine lets us mount one; the same words through a full disk otherwise."""
    code = (
        "import shutil, sys; from collections import namedtuple; from realmodel import cli;"
        "shutil.disk_usage = lambda p: namedtuple('Usage', 'total used free')(1, 1, 10**6);"
        "sys.argv = ['mismatch', 'demo', '--out', 'out']; sys.exit(cli.main())"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert "run folder out: 1 MB free, 300 MB needed" in refused(done)


def test_a_killed_run_says_so_and_leaves_whole_files(tmp_path: Path):
    process = subprocess.Popen(
        [MISMATCH, "demo", "--fast", "--out", "out"], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True, env=os.environ | {"MISMATCH_CACHE": str(tmp_path / "cache")},
    )  # fmt: skip
    deadline = time.monotonic() + 100
    while not (tmp_path / "out" / "run.json").exists() and time.monotonic() < deadline:
        time.sleep(0.2)
    time.sleep(2)
    process.send_signal(signal.SIGTERM)
    stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == 2, stderr
    assert stdout == ""
    assert "mismatch: interrupted; " in stderr
    assert "Traceback" not in stderr
    assert not list(tmp_path.rglob("*.tmp"))
    cache = list((tmp_path / "cache").iterdir()) if (tmp_path / "cache").exists() else []
    assert cache == []  # no half-built model
