"""A grid of real runs read back: what is planned, scores by hand, the tabular twin, rows of folders, the claims."""

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from realmodel.studies import claims, grid, study, validation
from realmodel.studies.grid import Grid
from realmodel.studies.validation import Evidence, Study
from sandbox.corrections import CORRECTIONS, EveryK, Never
from sandbox.errors import BadInput
from sandbox.output import config
from sandbox.tabular import problems, simulate
from sandbox.tabular.simulate import SimConfig
from sandbox.theory import collapse, levels

ROOT = Path(__file__).parents[3]


def test_the_default_grid_and_its_file_agree():
    asked = config.load(ROOT / "realmodel/configs/grid.toml", Grid)
    assert asked == Grid()
    runs = grid.planned(asked)
    assert len({run.name for run in runs}) == len(runs) == 4 * 2 * 2 * 3 + 4 * 2
    stale = [run for run in runs if run.correction != "on-policy"]
    assert {run.config.resync for run in stale} == {Never()}
    assert all(run.config.engine.dtype == run.dtype for run in runs)
    one = next(run for run in runs if run.name == "lr-0.0002/bfloat16/tis-3")
    assert (one.config.steps, one.config.seed, one.config.learning_rate) == (30, 3, 2e-4)
    assert one.config.correction == CORRECTIONS["tis"]
    fresh = next(run for run in runs if run.name == "lr-5e-05/on-policy-2")
    assert (fresh.config.resync, fresh.config.engine.dtype, fresh.config.steps) == (EveryK(1), "float32", 80)


def test_the_default_study_and_its_file_agree():
    asked = config.load(ROOT / "realmodel/configs/validate.toml", Study)
    assert asked == Study()
    runs = validation.planned(asked)
    assert len(runs) == 17 * 3
    assert {name for name, run in runs.items() if run.model == "small-moe"} == {
        f"mixture-{kind}-{seed}" for kind in ("none", "cis", "raised") for seed in (1, 2, 3)
    }
    assert len(validation.planned(replace(asked, mixture=""))) == 14 * 3
    assert (runs["fast-tis-2"].learning_rate, runs["stale-tis-2"].learning_rate) == (4e-4, 1e-4)
    assert runs["exact-2"].engine.kind == "exact"
    assert runs["off-dlc-1"].engine.offset_sd == 0.3
    assert runs["on-policy-3"].engine.offset_sd == 0.0
    assert runs["stale-raised-1"].correction.floor == -math.log(2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"steps": [3]}, "steps has 1 numbers for 4 learning_rates"),
        ({"seeds": 0}, "seeds is 0"),
        ({"on_policy": 1}, "on_policy is 1"),
        ({"dtypes": []}, "dtypes is empty"),
        ({"threshold": 1.0}, "threshold is 1.0"),
        ({"learning_rates": [2.0, 1e-4, 2e-4, 4e-4]}, "learning_rate is 2.0"),
        ({"base": {"prompts": 0}}, "prompts is 0"),
    ],
)
def test_impossible_grids_are_refused(change, message):
    with pytest.raises(BadInput, match=message):
        config.structure(change, Grid)


def test_scores_by_hand():
    """Uncorrected errors .25, 1 (a none that came), .1; in sample or not collapsed: not judged. Calls: 1 of 2 right."""
    table = pl.DataFrame(
        {
            "correction": ["none"] * 5 + ["tis"] * 2,
            "observed": [20.0, 8.0, 10.0, 6.0, math.inf, math.inf, 12.0],
            "out_of_sample": [True, True, True, False, True, True, True],
            "updates": [30] * 7,
            "quadratic": [25.0, math.inf, 9.0, 100.0, 3.0, 22.0, 15.0],
            "curved": [20.0, 8.0, math.nan, 1.0, 1.0, math.inf, math.inf],
            "twin": [math.nan] * 7,
            "path": [5.0, math.inf, math.nan, 5.0, 5.0, 5.0, 5.0],
            "constant": [10.0] * 7,
        }
    )
    told = {row["way"]: row for row in grid.scores(table)}
    assert told["quadratic"]["median_relative_error"] == pytest.approx(0.25)
    assert told["quadratic"]["worst_relative_error"] == math.inf
    assert (told["quadratic"]["n_error"], told["quadratic"]["right_calls"]) == (3, 0.5)
    assert (told["curved"]["n_error"], told["curved"]["median_relative_error"]) == (2, 0.0)
    assert told["curved"]["right_calls"] == 0.5
    assert told["constant"]["median_relative_error"] == pytest.approx(0.25)  # .5, .25, 0
    assert told["constant"]["right_calls"] == 0.5
    assert math.isnan(told["twin"]["median_relative_error"])
    assert told["twin"]["n_calls"] == 0


def test_the_twin_of_a_tree_is_the_tree():
    """Drift and noise of the tree itself: uncorrected, its mean field with the noise added, near simulated runs."""
    tree = problems.sparse_tree(np.random.default_rng(0))
    start = np.zeros(tree.shape)
    closed = levels.closed_form(tree, start, 1.0, 256)
    fit = collapse.Fit(closed.a, closed.b, closed.ess_step, "predicted", 9, (1.0, 2.0))
    told = grid.twin(fit, CORRECTIONS["none"], 60)
    runs = simulate.run(tree, start, SimConfig(steps=40, readings=True), range(8))
    assert abs(told - simulate.ess_steps(runs.table)["ess_step"].median()) <= 3
    bare = replace(fit, b=0.0)
    assert (
        grid.twin(bare, CORRECTIONS["none"], 60)
        == levels.mean_field(tree, start, SimConfig(step_size=1.0, steps=60)).ess_step
    )
    assert (
        grid.twin(bare, CORRECTIONS["tis"], 60)
        == levels.mean_field(tree, start, SimConfig(CORRECTIONS["tis"], step_size=1.0, steps=60)).ess_step
    )
    assert grid.twin(fit, CORRECTIONS["none"], 5) == math.inf
    assert math.isnan(grid.twin(replace(fit, a=math.nan, b=math.nan), CORRECTIONS["none"], 60))
    only_noise = replace(fit, a=0.0, b=0.1)
    assert grid.twin(only_noise, CORRECTIONS["none"], 60) == 7  # .1 k >= ln 2


def steps(var: np.ndarray, rate: np.ndarray, **more: np.ndarray | list) -> pl.DataFrame:
    k = np.arange(len(var))
    columns = {
        "probe_version": 0 * k,
        "version_train": k,
        "steps_since_sync": k,
        "probe_ess": np.exp(-var),
        "probe_ess_se": 0.01 + 0 * var,
        "probe_var_log_ratio": var,
        "probe_token_kl": 0.001 * var,
        "pass_probability": [[r - 0.1, r, r + 0.1] for r in rate.tolist()],
        "synced": 0 * k == 1,
    }
    return pl.DataFrame(columns | more)


def finished(folder: Path, table: pl.DataFrame) -> None:
    folder.mkdir(parents=True)
    table.write_parquet(folder / "steps.parquet")
    (folder / "run.json").write_text(json.dumps({"status": "finished"}))


def test_rows_of_a_grids_folder(tmp_path):
    asked = Grid((1e-4,), (40,), ("float32",), (CORRECTIONS["none"], CORRECTIONS["tis"]), seeds=2)
    k = np.arange(41)
    with pytest.raises(BadInput, match="no finished stale run"):
        grid.rows(asked, tmp_path)
    for seed in (1, 2):
        finished(tmp_path / f"lr-0.0001/on-policy-{seed}", steps(1e-3 / seed * k**2, 0.6 + 0.002 * seed + 0.0 * k))
        var = 1e-3 * seed * k**2 + 2e-3 * k
        finished(tmp_path / f"lr-0.0001/float32/none-{seed}", steps(var, np.where(k >= 30, 0.4, 0.6)))
    finished(tmp_path / "lr-0.0001/float32/tis-1", steps(0.002 * k, 0.6 + 0.0 * k))
    (tmp_path / "lr-0.0001/float32/tis-2").mkdir()  # begun, not finished
    table = grid.rows(asked, tmp_path)
    assert table["run"].to_list() == [f"lr-0.0001/float32/{name}" for name in ("none-1", "tis-1", "none-2")]
    first, corrected, second = table.rows(named=True)
    assert first["observed"] == first["quadratic"] == np.argmax(1e-3 * k**2 + 2e-3 * k > math.log(2))
    assert first["failure_step"] == second["failure_step"] == 30
    assert (first["constant"], second["constant"]) == (second["observed"], first["observed"])
    assert corrected["observed"] == corrected["quadratic"] == math.inf
    assert corrected["failure_step"] == math.inf
    assert corrected["path"] == first["path"] == (27 + 38) / 2  # sqrt(ln 2 / 1e-3) = 26.3, sqrt(2 ln 2 / 1e-3) = 37.2
    grid.save(table, grid.curves(asked, tmp_path), tmp_path)
    curves = pl.read_parquet(tmp_path / "curves.parquet")
    assert curves["run"].unique(maintain_order=True).to_list() == table["run"].to_list()
    assert curves.filter(run="lr-0.0001/float32/tis-1")["var_log_ratio"].to_list() == (0.002 * k).tolist()
    assert "lr-0.0001/float32/none-2" in (tmp_path / "report.html").read_text()
    assert json.loads(json.dumps(grid.outcome(table)["failure_before_ess_uncorrected"])) == 0.0


def evidence(**changes) -> Evidence:
    """Three seeds of everything, healthy: each claim holds that can."""
    k, seeds = np.arange(41), (1, 2, 3)
    flat = 0.7 + 0.0 * k
    d = np.full(41, 1e-5)

    def run(var, rate=flat, **more):
        g = 1e-4 * k
        parts = {"discrepancy": d, "lag": g, "cross_term": 0.0 * k, "total": d + g}
        kl = {f"kl_sampler_train_{name}": 0.0 * k for name in ("k1", "k2", "k3")}
        return steps(var, rate, **(parts | kl | more))

    zero = {"discrepancy": 0.0 * k, "total": 0.0 * k}
    table = {
        "on-policy": [run(0.0 * k, flat + 0.001 * s) for s in seeds],
        "exact": [run(0.0 * k, flat, **zero) for s in seeds],
        "stale-none": [run(2e-3 * k**2, np.where(k > 5, 0.4 + 0.01 * s, 0.7)) for s in seeds],
        "stale-tis": [run(1e-3 * k**2, np.where(k > 22, 0.6, 0.7)) for s in seeds],
        "dlc": [run(0.002 * k) for s in seeds],
        "stale-cis": [run(0.01 * k, flat + 0.001 * s) for s in seeds],
        "stale-raised": [run(0.01 * k, flat - 0.05 + 0.002 * s) for s in seeds],
        "off-none": [run(0.0 * k, flat + 0.001 * s) for s in seeds],
        "off-tis": [run(0.0 * k, flat + 0.002 * s) for s in seeds],
        "off-dlc": [run(0.0 * k, flat + 0.001 * s) for s in seeds],
        "mixture-cis": [run(0.01 * k, flat + 0.003 * s) for s in seeds],
        "mixture-raised": [run(0.01 * k, flat - 0.02 + 0.001 * s) for s in seeds],
        "fast-on-policy": [run(0.0 * k, flat + 0.001 * s) for s in seeds],
        "fast-tis": [run(1e-3 * k**2, np.where(k > 22, 0.6, 0.7)) for s in seeds],
        "fast-tis-ess": [run(0.01 * k) for s in seeds],
        "fast-tis-kl": [run(0.03 * k) for s in seeds],
    }
    kl = {"dlc": [0.15, 0.19, 0.1], "stale-none": [5.0, 6.0, 7.0], "stale-tis": [0.3, 0.4, 0.5]}
    return Evidence(table | changes, kl, [0.09, 0.1, 0.11], {}, 0.5)


@pytest.mark.parametrize(
    ("name", "broken"),
    [
        ("C1", lambda e: {"stale-none": [s.with_columns(cross_term=-pl.col("lag")) for s in e.steps["stale-none"]]}),
        ("C2", lambda e: {"stale-none": [s.with_columns(lag=pl.lit(1e-4)) for s in e.steps["stale-none"]]}),
        ("C4", lambda e: {"stale-none": e.steps["stale-tis"]}),
        ("C5", lambda e: {"fast-tis": e.steps["stale-none"]}),
        ("C7", lambda e: {"fast-tis-kl": e.steps["dlc"]}),
        ("C9", lambda e: {}),
        ("C10", lambda e: {"exact": [s.with_columns(total=pl.lit(1e-20)) for s in e.steps["exact"]]}),
        ("C11", lambda e: {"off-none": e.steps["stale-none"], "off-tis": e.steps["stale-tis"]}),
    ],
)
def test_each_claim_can_hold_and_fail(name, broken):
    claim = next(claim for claim in claims.CLAIMS if claim.id == name)
    seen = evidence()
    assert claim.experiment(seen).verdict == ("fails" if name == "C9" else "holds")
    if name == "C9":
        low = [steps(np.zeros(41), np.full(41, 0.5 + 0.01 * i)).select("pass_probability") for i in range(3)]
        worse = [s.with_columns(x) for s, x in zip(seen.steps["on-policy"], low, strict=True)]
        seen = evidence(**{"on-policy": worse})
        assert claim.experiment(seen).verdict == "holds"
        return
    assert claim.experiment(evidence(**broken(seen))).verdict == "fails"


def test_kl_in_units_and_the_interval():
    claim = next(claim for claim in claims.CLAIMS if claim.id == "C6")
    told = claim.experiment(evidence())
    assert told.verdict == "holds"
    assert told.value == pytest.approx(np.mean([1.5, 1.9, 1.0]))
    low, high = told.interval
    half = 4.302653 * np.std([1.5, 1.9, 1.0], ddof=1) / math.sqrt(3)  # t, 2 degrees of freedom
    assert (low, high) == pytest.approx((told.value - half, told.value + half), rel=1e-6)
    worse = replace(evidence(), kl={"dlc": [0.15, 0.21, 0.1], "stale-none": [5.0], "stale-tis": [0.3]})
    assert claim.experiment(worse).verdict == "fails"


def test_calibrated_second_moments_are_read_from_rollouts(tmp_path):
    """q = .5, pi/q 3 and .5: CIS at cap ln 2 gives min(rho, 2/(1 + q)) = 4/3 and 1/2; a masked token does not count."""
    folders = []
    for seed in range(3):
        (tmp_path / str(seed) / "rollouts").mkdir(parents=True)
        table = pl.DataFrame(
            {
                "logp_train": [[math.log(1.5), math.log(0.25), 0.0]],
                "logp_rollout": [[math.log(0.5), math.log(0.5), -9.0]],
                "mask": [[True, True, False]],
            }
        )
        table.write_parquet(tmp_path / str(seed) / "rollouts" / "step-00001.parquet")
        folders.append(tmp_path / str(seed))
    claim = next(claim for claim in claims.CLAIMS if claim.id == "C8")
    told = claim.experiment(replace(evidence(), rollouts={"stale-none": folders}))
    assert told.measured["second_moment"] == pytest.approx([(16 / 9 + 1 / 4) / 2] * 3)
    assert told.verdict == "holds"
    assert told.value == pytest.approx(0.05 - 0.002)
    mixture = next(claim for claim in claims.CLAIMS if claim.id == "C8 on a mixture of experts")
    told = mixture.experiment(replace(evidence(), rollouts={"mixture-none": folders}))
    assert (told.verdict, told.value) == ("holds", pytest.approx(0.02 + 0.004))
    without = {kind: runs for kind, runs in evidence().steps.items() if not kind.startswith("mixture")}
    assert mixture.experiment(replace(evidence(), steps=without)).verdict == "not tested"
    flipped = evidence(**{"stale-cis": evidence().steps["stale-raised"], "stale-raised": evidence().steps["stale-cis"]})
    assert claim.experiment(replace(flipped, rollouts={"stale-none": folders})).verdict == "fails"


def test_a_status_of_nothing(tmp_path):
    assert study.status(tmp_path) == "absent"
    with pytest.raises(BadInput, match="no checkpoint"):
        study.final(tmp_path)
    with pytest.raises(BadInput, match=r"unfinished runs: on-policy-1, exact-1, stale-none-1; go on with --resume"):
        validation.evidence(Study(), tmp_path)
