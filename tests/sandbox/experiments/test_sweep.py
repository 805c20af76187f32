"""`mismatch sweep`: what a row says, the same bits however it is run, kills of driver and workers, what is refused."""

import json
import os
import random
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from distributed import LocalCluster

from sandbox.corrections import CORRECTIONS, RESYNCS, EveryK
from sandbox.errors import BadInput
from sandbox.experiments import sweep
from sandbox.experiments.sweep import SweepConfig
from sandbox.output import config, plots, problem_json, run_folder
from sandbox.tabular import exact, simulate
from sandbox.tabular.policy import ConstantOffset
from sandbox.tabular.simulate import SimConfig
from sandbox.theory import collapse

ROOT = Path(__file__).parents[3]
MANY = [i / 1e4 for i in range(1, 1100)]
GRID = SweepConfig(
    ("machine", "bandit"),
    (CORRECTIONS["none"], CORRECTIONS["dlc"]),
    (EveryK(3), RESYNCS["ess_below"]),
    (0.0, 0.2),
    (0.7,),
    runs=5,
    steps=8,
    batch_size=32,
    seed=3,
    together=2,
)


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> pl.DataFrame:
    return sweep.run(GRID, tmp_path_factory.mktemp("sweep") / "one", workers=1)


def test_a_row_is_the_run_by_hand(table):
    assert len(table) == 2 * 2 * 2 * 2 * 5
    assert table["cell"].to_list() == sorted(table["cell"])
    chosen = table.filter(problem="machine", correction="dlc", discrepancy=0.2, resync="every(k=3)")
    case = problem_json.named("machine")
    problem, start = case.problem, case.sampler_logits
    training = SimConfig(CORRECTIONS["dlc"], EveryK(3), ConstantOffset(0.2), 0.7, 32, 8, seed=3)
    fresh = SimConfig(resync=EveryK(1), step_size=0.7, batch_size=32, steps=8, seed=3)
    trained = simulate.run(problem, start, training, range(5))
    on_policy = simulate.run(problem, start, fresh, range(10))
    final = [p.state.policies.train for p in (trained, on_policy)]
    pair = np.mean([exact.kl(problem, final[1][i], final[1][5 + i]) for i in range(5)])
    returns = [one["return"].to_numpy()[:, None] for one in on_policy.table.partition_by("run", maintain_order=True)]
    for run, row in enumerate(chosen.iter_rows(named=True)):
        own = trained.table.filter(run=run)
        assert row["run"] == run
        assert row["staleness"] == 3
        assert row["return"] == own["return"][-1]
        assert row["return_sampler"] == own["return_sampler"][-1]
        assert row["syncs"] == 2
        assert row["failure_step"] == 1 + collapse.failure_step(own["return"].to_numpy()[:, None], returns)
        np.testing.assert_allclose(row["kl"], exact.kl(problem, final[1][run], final[0][run]) / pair, rtol=1e-12)
    assert chosen["ess_step"].equals(simulate.ess_steps(trained.table)["ess_step"])
    on = table.filter(problem="bandit", correction="none", discrepancy=0.0, resync="ess_below")
    assert on["staleness"].is_null().all()


def test_the_summary_is_upper_medians_and_means(table):
    rows = sweep.summary(table)
    assert len(rows) == 16
    first, own = rows.row(0, named=True), table.filter(cell=0)
    assert first["ess_step"] == sorted(own["ess_step"])[2]
    assert first["failure_step"] == sorted(own["failure_step"])[2]
    assert first["kl"] == pytest.approx(np.mean(own["kl"].to_list()))
    assert first["runs"] == 5
    assert plots.phase_maps(rows) is None  # one period only
    other = rows.with_columns(staleness=pl.lit(9, pl.Int64), kl=pl.col("kl") * 10)
    figure = plots.phase_maps(pl.concat([rows, other.filter(pl.col("resync") == "every(k=3)")]))
    assert figure is not None
    assert [ax.get_title() for ax in figure.axes[:2]] == ["uncorrected", "DLC"]


def test_workers_batches_and_a_dask_cluster_with_a_killed_worker_change_no_bit(table, tmp_path):
    two = sweep.run(replace(GRID, together=5), tmp_path / "two", workers=2)
    assert two.equals(table)
    killed = []
    with LocalCluster(n_workers=2, threads_per_worker=1, processes=True, dashboard_address=None) as cluster:

        def kill_one(done: int, total: int) -> None:
            if done >= 3 and not killed:
                killed.append(next(iter(cluster.workers.values())).pid)
                os.kill(killed[0], signal.SIGKILL)

        address = cluster.scheduler_address
        dask = sweep.run(GRID, tmp_path / "dask", backend="dask", address=address, progress=kill_one)
    assert killed
    assert dask.equals(table)


def arguments(toml: Path, folder: Path, *more: str) -> list[str]:
    return [sys.executable, "-m", "realmodel.cli", "sweep", str(toml), "--out", str(folder), "--workers", "2", *more]


def test_a_killed_sweep_goes_on_with_what_is_missing(table, tmp_path):
    """SIGKILL after a random number of parts, three times over the same folder."""
    toml, folder, rng = tmp_path / "grid.toml", tmp_path / "killed", random.Random(5)
    toml.write_text(
        'problems = ["machine", "bandit"]\ncorrections = ["none", "dlc"]\ndiscrepancies = [0.0, 0.2]\n'
        'resyncs = [{preset = "every", k = 3}, "ess_below"]\nstep_sizes = [0.7]\n'
        "runs = 5\nsteps = 8\nbatch_size = 32\nseed = 3\ntogether = 2\n"
    )
    assert config.load(toml, SweepConfig) == GRID
    kept: dict[str, int] = {}
    for attempt in range(3):
        enough = len(kept) + rng.randint(1, 12)
        code = (
            "import os, signal; from pathlib import Path; from sandbox.experiments import sweep; "
            "from sandbox.output import config; "
            f"grid = config.load(Path({str(toml)!r}), sweep.SweepConfig); "
            f"kill = lambda done, total: done >= {enough} and os.killpg(0, signal.SIGKILL); "
            f"sweep.run(grid, Path({str(folder)!r}), {attempt > 0}, workers=2, progress=kill)"
        )
        killed = subprocess.run([sys.executable, "-c", code], cwd=ROOT, start_new_session=True, check=False)
        assert killed.returncode == -signal.SIGKILL
        now = {path.name: path.stat().st_mtime_ns for path in folder.glob("parts/*.parquet")}
        assert kept.items() <= now.items()  # nothing was done twice
        kept = now
    assert len(kept) < len(sweep.tasks(GRID))
    done = subprocess.run(
        arguments(toml, folder, "--resume", "--json"), cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert pl.read_parquet(folder / "runs.parquet").equals(table)
    assert json.loads((folder / "run.json").read_text())["status"] == "finished"
    assert len(json.loads(done.stdout)["cells"]) == 16
    assert f"was killed; {len(kept)} of {len(sweep.tasks(GRID))} tasks are done" in done.stderr.replace("\n", " ")


def test_a_folder_of_another_config_or_problem_is_not_resumed(tmp_path):
    problem_json.save(tmp_path / "mine.json", problem_json.named("bandit"))
    grid = SweepConfig((str(tmp_path / "mine.json"),), runs=2, steps=2, batch_size=4)
    sweep.run(grid, tmp_path / "run", workers=1)
    with pytest.raises(BadInput, match="not empty"):
        sweep.run(grid, tmp_path / "run", workers=1)
    with pytest.raises(BadInput, match=r"cannot be resumed: its config has another runs, seed$"):
        sweep.run(replace(grid, runs=3, seed=1), tmp_path / "run", True, workers=1)
    with pytest.raises(BadInput, match=r"no readable run\.json"):
        sweep.run(grid, tmp_path / "nowhere", True, workers=1)
    problem_json.save(tmp_path / "mine.json", problem_json.named("negative_prefixes"))
    with pytest.raises(BadInput, match="another digests"):
        sweep.run(grid, tmp_path / "run", True, workers=1)


def test_on_policy_training_is_kept_and_done_once(table, tmp_path, monkeypatch):
    """Stopped after the first part of a cell: what it is held against is there, in shares, and resuming redoes none."""

    def stop(done: int, total: int) -> None:
        if list((tmp_path / "run" / "parts").glob("part-*")):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        sweep.run(GRID, tmp_path / "run", workers=1, progress=stop)
    assert run_folder.read_run(tmp_path / "run")["status"] == "interrupted"
    parts = tmp_path / "run" / "parts"
    assert len(list(parts.glob("reference-*"))) == 2 * 5  # two problems, ten runs of each, two a task
    monkeypatch.setattr(sweep, "on_policy", None)
    assert sweep.run(GRID, tmp_path / "run", True, workers=1).equals(table)
    for path in parts.glob("reference-*"):
        path.unlink()
    assert sweep.run(GRID, tmp_path / "run", True, workers=1).equals(table)  # nothing is missing that needs them


@pytest.mark.parametrize("part", ["reference-000001-000004", "part-000003-000002"])
def test_a_damaged_part_is_one_line_that_names_it(part, table, tmp_path):
    sweep.run(GRID, tmp_path / "run", workers=1)
    path = tmp_path / "run" / "parts" / f"{part}.parquet"
    other = path.with_name("part-000000-000000.parquet").read_bytes()
    for content in (path.read_bytes()[:-20], b"", other):
        path.write_bytes(content)
        with pytest.raises(BadInput, match=rf"part .*{part}\.parquet is damaged"):
            sweep.run(GRID, tmp_path / "run", True, workers=1)
    path.unlink()
    assert sweep.run(GRID, tmp_path / "run", True, workers=1).equals(table)


def test_two_processes_do_not_share_a_folder(tmp_path):
    grid = SweepConfig(("bandit",), runs=2, steps=2, batch_size=4)
    with run_folder.alone(tmp_path / "run"), pytest.raises(BadInput, match="another process is at work in"):
        sweep.run(grid, tmp_path / "run", workers=1)
    sweep.run(grid, tmp_path / "run", workers=1)
    before = (tmp_path / "run" / "run.json").read_bytes()
    with run_folder.alone(tmp_path / "run"), pytest.raises(BadInput, match="another process is at work in"):
        sweep.run(grid, tmp_path / "run", True, workers=1)
    assert (tmp_path / "run" / "run.json").read_bytes() == before


def test_a_dead_worker_is_one_line(tmp_path):
    def kill(done: int, total: int) -> None:
        if done == 1:
            for child in Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split():
                command = Path(f"/proc/{child}/cmdline").read_bytes()
                if b"loky" in command and b"resource_tracker" not in command:
                    os.kill(int(child), signal.SIGKILL)

    with pytest.raises(BadInput, match=r"a worker died; every finished task is in .*, go on with --resume"):
        sweep.run(GRID, tmp_path / "dead", workers=2, progress=kill)
    assert sweep.run(GRID, tmp_path / "dead", True, workers=1).height == 80


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"problems": []}, "problems is empty"),
        ({"corrections": ["tis", "tis"]}, "corrections has a value twice"),
        ({"step_sizes": [0.0]}, "step_sizes has 0.0"),
        ({"discrepancies": [-0.1]}, "sd is -0.1"),
        ({"runs": 1}, "runs is 1"),
        ({"together": 0}, "together is 0"),
        ({"threshold": 1.5}, "threshold is 1.5"),
        ({"batch_size": 1}, "batch_size is 1"),
        ({"discrepancies": MANY, "step_sizes": MANY}, "the grid has 1207801 cells"),
        ({"start": "zero"}, "start"),
        ({"lags": [1]}, "lags"),
    ],
)
def test_impossible_grids_are_refused(change, message):
    with pytest.raises(BadInput, match=message):
        config.structure({"problems": ["bandit"]} | change, SweepConfig)


def test_the_commands_refuse_in_one_line(mismatch, tmp_path):
    toml = tmp_path / "grid.toml"
    toml.write_text('problems = ["nowhere"]\n')
    for more, message in (
        (["--out", "new"], "nowhere: no such file, nor a preset"),
        (["--out", "new", "--workers", "0"], "workers is 0"),
        (["--resume"], "--resume needs --out"),
    ):
        status, out, err = mismatch("sweep", str(toml), *more)
        assert (status, out) == (2, "")
        assert message in err.splitlines()[-1]
        assert not (tmp_path / "new").exists()


def test_an_address_without_a_cluster_is_refused(mismatch, tmp_path):
    toml = tmp_path / "grid.toml"
    toml.write_text('problems = ["bandit"]\n')
    status, _, err = mismatch("sweep", str(toml), "--out", "new", "--address", "tcp://here:1")
    assert status == 2
    assert "address is tcp://here:1, and backend loky has none" in err
    assert not (tmp_path / "new").exists()


def test_simulate_keeps_every_step_of_the_only_cell(mismatch, tmp_path):
    toml = tmp_path / "one.toml"
    toml.write_text('problems = ["bandit"]\ncorrections = ["tis"]\nruns = 3\nsteps = 4\nbatch_size = 16\n')
    status, out, err = mismatch("simulate", str(toml), "--json", "--out", "kept")
    assert status == 0, err
    steps = pl.read_parquet(tmp_path / "kept" / "steps.parquet")
    case = problem_json.named("bandit")
    cfg = SimConfig(CORRECTIONS["tis"], batch_size=16, steps=4)
    assert steps.equals(simulate.run(case.problem, case.sampler_logits, cfg, range(3)).table)
    assert json.loads(out)["return"] == pytest.approx(steps.filter(step=4)["return"].mean())
    toml.write_text('problems = ["bandit"]\ncorrections = ["tis", "none"]\n')
    status, _, err = mismatch("simulate", str(toml))
    assert status == 2
    assert "the grid has 2 cells, expected one" in err
