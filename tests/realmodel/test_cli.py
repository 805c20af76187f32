"""What a user sees who types something wrong: one line on standard error, exit status 2, nothing left behind."""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections import namedtuple
from pathlib import Path

import pytest

MISMATCH = Path(sys.executable).with_name("mismatch")


def refused(status: int, stdout: str, stderr: str) -> str:
    assert status == 2
    assert stdout == ""
    lines = [line for line in stderr.splitlines() if line.startswith("mismatch: ")]
    assert len(lines) == 1, stderr
    assert "Traceback" not in stderr
    return lines[0]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("sede = 1", "extra fields found (sede)"),
        ('correction = "dlcc"', "unknown correction 'dlcc', known: none, "),
        ('model = "/nowhere/qwen"', "model '/nowhere/qwen' is no folder"),
        ('task = "sort99"', "task 'sort99' is unknown"),
        ('model = "broken"', "model 'broken' has no config.json"),
        ('[engine]\ndtype = "int4"', "'int4' is none of 'float32', 'bfloat16', 'float16' at engine.dtype"),
        ("prompts = 0", "prompts is 0, expected at least 1"),
        ("seed = -1", "seed is -1, expected at least 0"),
        ("betas = [2.0, 3.0]", "betas is [2.0, 3.0], expected two numbers from 0 to below 1"),
        ("[engine]\nmax_model_len = 1", "engine.max_model_len is 1, expected at least 2"),
        ("learning_rate = -1e-4", "learning_rate is -0.0001, expected"),
    ],
)
def test_bad_configs(mismatch, tmp_path: Path, text: str, message: str):
    (tmp_path / "run.toml").write_text(text)
    (tmp_path / "broken").mkdir()
    assert message in refused(*mismatch("train", "run.toml", "--out", "out", "--json"))
    assert not (tmp_path / "out").exists()


def test_an_existing_run_folder_is_not_touched(tmp_path: Path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "steps.parquet").write_text("precious")
    command = [MISMATCH, "demo", "--fast", "--out", "out"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert "run folder out is not empty" in refused(done.returncode, done.stdout, done.stderr)
    assert (tmp_path / "out" / "steps.parquet").read_text() == "precious"


def test_a_folder_that_cannot_be_made_is_refused_at_once(mismatch, tmp_path: Path):
    (tmp_path / "file").write_text("x")
    assert "run folder file/out cannot be made" in refused(*mismatch("demo", "--out", "file/out"))
    assert "cannot be made: File name too long" in refused(*mismatch("demo", "--out", "a" * 300))


def test_output_that_goes_nowhere(tmp_path: Path):
    with Path("/dev/full").open("w") as full:
        done = subprocess.run([MISMATCH, "exact", "bandit", "--json"], stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 2
    assert "No space left on device" in done.stderr
    assert "Traceback" not in done.stderr


def test_no_space(mismatch, monkeypatch):
    usage = namedtuple("usage", "total used free")(1, 1, 10**6)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    assert "run folder out: 1 MB free, 300 MB needed" in refused(*mismatch("demo", "--out", "out"))


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
