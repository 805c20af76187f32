"""`mismatch predict`: levels of a tabular config, the fit to a run folder, what is refused, nothing of torch."""

import json
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import polars as pl
import pytest

from realmodel.studies import compare
from sandbox.corrections import CORRECTIONS, EveryK
from sandbox.errors import BadInput
from sandbox.experiments import predict
from sandbox.experiments.predict import PredictConfig
from sandbox.output import config, problem_json
from sandbox.tabular import simulate
from sandbox.tabular.policy import GivenOffset
from sandbox.tabular.simulate import SimConfig
from sandbox.theory import collapse, levels

ROOT = Path(__file__).parents[3]


SMALL = PredictConfig("sparse_tree", "uniform", exact_sampler=True, step_size=2.0, steps=30, runs=4)


@pytest.fixture(scope="module")
def outcome():
    return predict.tabular(SMALL)


def test_levels_are_those_of_theory_and_simulation(outcome):
    problem = problem_json.named("sparse_tree").problem
    logits = np.zeros(problem.shape)
    closed = levels.closed_form(problem, logits, 2.0, 256)
    field = levels.mean_field(problem, logits, SimConfig(step_size=2.0, steps=30))
    steps = outcome["ess_step"]
    assert steps["closed_form"] == closed.ess_step
    assert steps["linearised"] == levels.linearised(problem, logits, SimConfig(step_size=2.0, steps=30), closed.b)[1]
    assert steps["mean_field"] == outcome["prediction"] == field.ess_step
    assert abs(steps["simulated"] - field.ess_step) <= 2
    assert outcome["status"] == "predicted"
    curve = pl.DataFrame(outcome["curve"])
    assert curve.columns == ["k", "closed_form", "linearised", "mean_field", "ess", "return"]
    assert len(curve) == 30
    first = curve.filter(pl.col("ess") < 0.5)["k"][0]
    assert first == field.ess_step
    crossed = curve.filter(pl.col("closed_form") >= math.log(2))["k"][0]
    assert crossed == closed.ess_step


def test_failure_step_is_that_of_the_returns(outcome):
    problem = problem_json.named("sparse_tree").problem
    logits = np.zeros(problem.shape)
    cfg = predict.training(SMALL, 0.0)
    stale = simulate.run(problem, logits, cfg, range(4)).table
    fresh = simulate.run(problem, logits, replace(cfg, resync=EveryK(1)), range(4, 8)).table
    steps = (1 + collapse.failure_steps(*(x["return"].to_numpy().reshape(4, -1) for x in (stale, fresh)))).tolist()
    mean = np.mean([one["return"].to_numpy() for one in fresh.partition_by("run")], axis=0)
    for one, step in zip(stale.partition_by("run", maintain_order=True), steps, strict=True):
        assert math.isfinite(step)  # a stale sampler without correction loses this problem
        gap = mean - one["return"].to_numpy()
        at = int(step) - 1  # row 0 is after the first update
        assert gap[at : at + collapse.LASTING].min() > 0
    assert outcome["failure_step"] == {"simulated": sorted(steps)[2], "share": 1.0}


def test_failure_step_is_a_number_of_updates(monkeypatch):
    """Rows begin after the first update: where the fourth row is the first that is low, failure_step is 4."""
    k = np.arange(1, 13)
    fresh = np.stack([0.5 + 0.01 * k, 0.502 + 0.01 * k])
    stale = np.stack([0.5 + 0.01 * k - 0.1 * (k >= 4), 0.501 + 0.01 * k])
    assert collapse.failure_steps(stale, fresh).tolist() == [3.0, math.inf]
    runs = iter([stale, fresh])

    def run(problem, logits, cfg, seeds):
        table = pl.DataFrame({"run": np.repeat([0, 1], 12), "step": np.tile(k, 2), "return": next(runs).ravel()})
        return SimpleNamespace(table=table)

    steps = pl.DataFrame({"ess_step": [2.0, 3.0]})
    monkeypatch.setattr(predict, "simulate", SimpleNamespace(run=run, ess_steps=lambda table, threshold: steps))
    told = predict.tabular(replace(SMALL, steps=12, runs=2))
    assert told["failure_step"] == {"simulated": math.inf, "share": 0.5}
    runs = iter([stale[[0, 0]], fresh])
    assert predict.tabular(replace(SMALL, steps=12, runs=2))["failure_step"] == {"simulated": 4.0, "share": 1.0}


def test_a_threshold_and_a_horizon_are_parameters():
    early, late = (predict.tabular(replace(SMALL, steps=12, threshold=threshold, runs=0)) for threshold in (0.9, 0.2))
    assert early["prediction"] < late["prediction"]
    short = predict.tabular(replace(SMALL, steps=3, runs=0))
    assert short["status"] == "no_collapse_within_horizon"
    assert math.isinf(short["ess_step"]["closed_form"])
    assert "failure_step" not in short


def test_a_users_own_problem_starts_at_its_samplers_weights_under_its_offset(tmp_path):
    """Against mean-field training and simulation by hand; the closed form knows neither correction nor offset."""
    case = problem_json.named("machine")
    problem_json.save(tmp_path / "mine.json", case)
    asked = PredictConfig(str(tmp_path / "mine.json"), correction=CORRECTIONS["tis"], step_size=2.0, steps=12, runs=2)
    told = predict.tabular(asked)
    problem, start = case.problem, case.sampler_logits
    field = levels.mean_field(
        problem,
        start,
        SimConfig(CORRECTIONS["tis"], step_size=2.0, steps=12, discrepancy=GivenOffset(case.sampler_log_offset)),
    )
    assert np.array_equal([row["ess"] for row in told["curve"]], field.table["ess"])
    config = simulate.SimConfig(
        CORRECTIONS["tis"], discrepancy=GivenOffset(case.sampler_log_offset), step_size=2.0, steps=12
    )
    runs = simulate.run(problem, start, config, range(2))
    assert np.array_equal(runs.state.log_offset[1], case.sampler_log_offset)
    assert told["ess_step"]["simulated"] == simulate.ess_steps(runs.table)["ess_step"].max()
    without = predict.tabular(replace(asked, exact_sampler=True, runs=0))
    assert without["curve"][5]["ess"] != told["curve"][5]["ess"]
    assert without["curve"][5]["linearised"] != told["curve"][5]["linearised"]
    assert without["curve"][5]["closed_form"] == told["curve"][5]["closed_form"]


def test_a_correction_without_a_recursion_is_left_to_simulation():
    outcome = predict.tabular(
        PredictConfig("bandit", "uniform", correction=CORRECTIONS["seq_tis"], steps=20, runs=2, step_size=0.1)
    )
    assert math.isnan(outcome["ess_step"]["mean_field"])
    assert outcome["prediction"] == outcome["ess_step"]["simulated"]
    silent = predict.tabular(PredictConfig("bandit", "uniform", correction=CORRECTIONS["seq_tis"], steps=5, runs=0))
    assert silent["status"] == "not_identifiable"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"start": "zero"}, "start"),
        ({"threshold": 1.0}, "threshold is 1.0"),
        ({"runs": 1}, "runs is 1"),
        ({"step_size": 0.0}, "step_size is 0.0"),
        ({"steps": 0}, "steps is 0"),
        ({"batch": 3}, "batch"),
    ],
)
def test_impossible_configs_are_refused(change, message):
    with pytest.raises(BadInput, match=message):
        config.structure({"problem": "bandit"} | change, PredictConfig)


def run_folder(path: Path, var: np.ndarray, ess: np.ndarray, rate: np.ndarray) -> Path:
    path.mkdir()
    k = np.arange(len(var))
    pl.DataFrame(
        {
            "probe_version": 0 * k,
            "version_train": k,
            "probe_ess": ess,
            "probe_ess_se": 0 * var + 0.02,
            "probe_var_log_ratio": var,
            "probe_token_kl": 0.001 * var,
            "pass_probability": [[r - 0.1, r, r + 0.1] for r in rate.tolist()],
        }
    ).write_parquet(path / "steps.parquet")
    return path


def test_a_run_folder_is_predicted_from_its_own_first_steps(tmp_path):
    k = np.arange(41)
    var = 1e-3 * k**2 + 2e-3 * k
    run = run_folder(tmp_path / "run", var, np.exp(-var), np.where(k >= 30, 0.4, 0.6))
    others = [run_folder(tmp_path / f"on{i}", 0 * var, 1 + 0 * var, 0.6 + 0.002 * i + 0 * k) for i in range(3)]
    outcome = compare.predict(run, others, 0.5)
    truth = float(np.argmax(np.exp(-var) < 0.5))
    assert outcome["predicted_ess_step"] == outcome["observed_ess_step"] == truth
    assert outcome["curved"]["predicted_ess_step"] == pytest.approx(truth, abs=1)
    assert outcome["relative_error"] == 0
    assert outcome["out_of_sample"]
    assert outcome["failure_step"] == 30
    assert len(outcome["curve"]) == 40
    assert math.isnan(compare.predict(run, [], 0.5)["failure_step"])
    strict = compare.predict(run, [], 0.8)
    assert strict["observed_ess_step"] == float(np.argmax(np.exp(-var) < 0.8))
    with pytest.raises(BadInput, match="no readable"):
        compare.predict(tmp_path, [], 0.5)


def mismatch(*arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "realmodel.cli", *arguments], capture_output=True, text=True, cwd=ROOT, timeout=120
    )


def test_the_command_prints_one_object_keeps_a_folder_and_needs_no_torch(tmp_path):
    source = tmp_path / "a.toml"
    source.write_text('problem = "bandit"\nstep_size = 0.2\nsteps = 10\nruns = 2\n')
    code = (
        "import sys; from realmodel import cli; "
        f"sys.argv = ['mismatch', 'predict', {str(source)!r}, '--json', '--out', {str(tmp_path / 'kept')!r}]; "
        "status = cli.main(); assert 'torch' not in sys.modules; sys.exit(status)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=120)
    assert done.returncode == 0, done.stderr
    outcome = json.loads(done.stdout)
    assert set(outcome["ess_step"]) == {*predict.LEVELS, "simulated_interval"}
    kept = {path.name for path in (tmp_path / "kept").iterdir()}
    assert kept == {"run.json", "predict.json", "curve.parquet", "predict.svg"}
    assert json.loads((tmp_path / "kept" / "predict.json").read_text()) == outcome


def test_bad_input_is_one_line_and_status_two(tmp_path):
    source = tmp_path / "a.toml"
    source.write_text('problem = "nowhere"\n')
    for target, message in (
        (source, "nowhere: no such file, nor a preset"),
        (tmp_path / "none.toml", "cannot be read"),
    ):
        done = mismatch("predict", str(target), "--json")
        assert done.returncode == 2
        assert done.stdout == ""
        assert message in done.stderr
        assert len(done.stderr.splitlines()) == 1


def test_the_table_says_how_long_was_predicted_and_how_long_was_watched():
    """A sync after 9 updates ends the watch; the prediction and the failure are of the whole run of 50."""
    k = np.arange(10)
    since = pl.DataFrame({"k": k, "ess": np.exp(-1e-5 * k), "var_log_ratio": 1e-5 * k})
    (rows,) = predict.tables(predict.measured(since, 0.5, 50) | {"failure_step": math.inf}).values()
    assert rows[0]["predicted ess_step"] == "none within 50 updates"
    assert rows[0]["observed ess_step"] == "none within 9 updates"
    assert rows[0]["failure_step"] == "none within 50 updates"
    # synced after every update: nothing was watched, and there is no crash
    (rows,) = predict.tables(predict.measured(since.head(1), 0.5, 50) | {"failure_step": math.nan}).values()
    assert rows[0]["observed ess_step"] == "none within 0 updates"
