"""`mismatch exact`: what it prints and keeps, what it refuses, and that it starts without the heavy libraries."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from realmodel import cli
from sandbox.experiments import exact_report
from sandbox.output import problem_json
from sandbox.output.run_folder import plain
from sandbox.tabular import problems


@pytest.mark.parametrize("name", ["bandit", "negative_prefixes"])
def test_json_is_the_summary_and_nothing_else(mismatch, name):
    status, out, err = mismatch("exact", name, "--json", "--matrices")
    assert (status, err) == (0, "")
    assert json.loads(out) == plain(exact_report.summary(problems.PRESETS[name](), with_matrices=True))


def test_a_file_without_offset_or_sampler_logits_is_on_policy(mismatch, tmp_path):
    problem = {"transition": [[1, -1], [0, 1]], "reward": [[0, 1], [2, -1]], "horizon": 5, "logits": [[0, 1], [1, 0]]}
    (tmp_path / "mine.json").write_text(json.dumps(problem))
    status, out, _ = mismatch("exact", "mine.json", "--json")
    result = json.loads(out)
    assert status == 0
    assert "lag_matrices" not in result
    assert np.allclose([result["ess"][k] for k in ("lag", "discrepancy", "total", "lag_under_sampler")], 1, rtol=1e-13)
    assert result["kl_train_sampler"] == result["kl_sampler_train"] == result["token_kl_on_sampler_prefixes"] == 0
    for name in exact_report.CORRECTIONS:
        assert np.allclose(result["expected_update"][name], result["gradient"], rtol=1e-12, atol=1e-15)
    assert not np.any(result["discrepancy_bias"]["total"])


def test_the_table_for_people(mismatch):
    status, out, err = mismatch("exact", "machine")
    assert (status, err) == (0, "")
    for word in ("discrepancy", "lag_under_sampler", "icepop", "within_token", "downstream", "cosine with gradient"):
        assert word in out
    assert max(map(len, out.splitlines())) <= 120


def test_out_keeps_the_problem_and_the_answer_and_is_never_overwritten(mismatch, tmp_path):
    status, out, _ = mismatch("exact", "bandit", "--out", "kept", "--json")
    assert status == 0
    assert json.loads((tmp_path / "kept" / "exact.json").read_text()) == json.loads(out)
    assert problem_json.load(tmp_path / "kept" / "problem.json").problem.shape == (1, 2)
    run = json.loads((tmp_path / "kept" / "run.json").read_text())
    assert (run["status"], run["config"]["problem"]) == ("finished", "bandit")
    status, out, err = mismatch("exact", "bandit", "--out", "kept")
    assert (status, out) == (2, "")
    assert "run folder kept is not empty" in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere.json"], "nowhere.json: no such file, nor a preset (bandit, "),
        (["bad.json"], "bad.json: logits[0][1] is nan, which is not finite"),
        (["sparse_tree", "--matrices", "--out", "new"], "matrix M has 5460 columns"),
    ],
)
def test_refusals_are_one_line_and_status_2(mismatch, tmp_path, arguments, message):
    bad = {"transition": [[-1, -1]], "reward": [[0, 1]], "horizon": 1, "logits": [[0, float("nan")]]}
    (tmp_path / "bad.json").write_text(json.dumps(bad))
    status, out, err = mismatch("exact", *arguments, "--json")
    assert (status, out) == (2, "")
    assert err.startswith(f"mismatch: {message}")
    assert err.count("\n") == 1
    assert not (tmp_path / "new").exists()


def test_it_starts_without_the_heavy_libraries():
    """In a process of its own: the whole command in a second or two, most of it imports."""
    code = (
        "import sys; from realmodel import cli; sys.argv = ['mismatch', 'exact', 'bandit', '--json']; s = cli.main();"
        "heavy = {'torch', 'vllm', 'transformers', 'numba', 'sympy', 'matplotlib'} & set(sys.modules);"
        "sys.exit(f'imported {heavy}' if heavy else s)"
    )
    root = Path(cli.__file__).parents[1]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["return_train"] == pytest.approx(0.5)
