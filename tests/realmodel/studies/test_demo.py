"""The main job as a user runs it, `mismatch demo --fast --json`: numbers, folder, page. A run that is killed."""

import json
import math
import os
import re
import signal
import subprocess
import time

import numpy as np
import polars as pl
import pytest

from tests.realmodel.test_cli import MISMATCH

pytestmark = pytest.mark.slow


@pytest.mark.timeout(900)
def test_demo(tmp_path):
    command = [MISMATCH, "demo", "--fast", "--json", "--out", "out"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, done.stderr
    outcome = json.loads(done.stdout)  # one object and nothing else
    runs = {(row["run"], row["seed"]): row for row in outcome["runs"]}
    assert set(runs) == {("on-policy", 0), ("on-policy", 1), ("uncorrected", 1), ("token TIS", 1), ("DLC", 1)}
    for name, folder in (("uncorrected", "none-1"), ("token TIS", "tis-1"), ("DLC", "dlc-1")):
        row = runs[name, 1]
        assert {"predicted_ess_step", "observed_ess_step", "failure_step", "token_kl_at_ess_step"} <= set(row)
        # bfloat16 against float32: neither rounding of one dtype nor a fault
        assert 1e-3 < row["rms_discrepancy"] < 2e-2
        steps = pl.read_parquet(tmp_path / "out" / folder / "steps.parquet")
        ess = steps["probe_ess"].to_numpy()
        below = np.flatnonzero(ess[steps["version_rollout"].to_numpy() == 0] < 0.5)
        observed = math.inf if row["observed_ess_step"] == "inf" else row["observed_ess_step"]
        assert observed == (below[0] if len(below) else math.inf)
        assert row["final_pass_rate"] == pytest.approx(np.mean(steps["pass_probability"].to_list()[-1]))
    assert runs["on-policy", 1]["kl_from_on_policy"] == 1.0
    assert runs["uncorrected", 1]["kl_from_on_policy"] > 2.0
    for row in outcome["tabular"][1:]:
        close = abs(row["mean_field_ess_step"] - row["simulated_ess_step"])
        assert close <= max(1, 0.15 * row["mean_field_ess_step"])
    page = (tmp_path / "out" / "report.html").read_text()
    assert not re.search(r"""(src|href)=["'](?!#)|url\((?!#)|@import""", page)  # nothing to fetch
    assert page.count("<svg") == 1
    run = json.loads((tmp_path / "out" / "run.json").read_text())
    assert run["status"] == "finished"
    assert run["results"]["runs"] == outcome["runs"]


@pytest.mark.timeout(300)
def test_a_run_killed_without_warning_leaves_whole_steps(tmp_path):
    (tmp_path / "run.toml").write_text('steps = 500\nprobe = 64\nheld_out = 16\n[engine]\ndtype = "bfloat16"')
    process = subprocess.Popen([MISMATCH, "train", "run.toml", "--out", "out"], cwd=tmp_path, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 200
    while len(list(tmp_path.glob("out/rollouts/*"))) < 5 and time.monotonic() < deadline:
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    steps = pl.read_parquet(tmp_path / "out" / "steps.parquet")
    assert steps["step"].to_list() == list(range(len(steps)))
    rollouts = sorted(tmp_path.glob("out/rollouts/*.parquet"))
    assert len(rollouts) >= 5
    assert all(len(pl.read_parquet(path)) == 256 for path in rollouts)
    assert json.loads((tmp_path / "out" / "run.json").read_text())["status"] == "running"
