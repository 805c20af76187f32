"""Runs that are killed, run out of disk or lose their engine go on to the very table of a run that was not."""

import json
import os
import resource
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from realmodel.engine import sampler
from realmodel.training import checkpoint, train
from sandbox.errors import BadInput
from tests.support import kill_me

ROLLOUTS = [f"step-{step:06d}.parquet" for step in range(kill_me.CONFIG["steps"])]


@pytest.fixture(autouse=True)
def reward(monkeypatch):
    monkeypatch.setattr(train, "_reward", kill_me.reward)


@pytest.fixture(scope="module")
def exact_engine(folder):
    return sampler.start(folder, kill_me.config("exact").engine)


@pytest.fixture(scope="module")
def whole(folder, exact_engine, tmp_path_factory):
    """The exact engine's run that nothing interrupts: its folder and its table."""
    out = tmp_path_factory.mktemp("whole") / "run"
    return out, kill_me.run(folder, out, "exact", exact_engine)


def same(out: Path, steps: pl.DataFrame, whole: tuple[Path, pl.DataFrame]) -> None:
    """Bitwise: the steps, every rollout, no file more, and a run.json that says finished."""
    assert steps.equals(whole[1])
    assert sorted(p.name for p in (out / "rollouts").iterdir()) == ROLLOUTS
    for name in ROLLOUTS:
        assert pl.read_parquet(out / "rollouts" / name).equals(pl.read_parquet(whole[0] / "rollouts" / name))
    assert {p.name for p in out.iterdir()} == {"run.json", "steps.parquet", "rollouts", checkpoint.FILE}
    run = json.loads((out / "run.json").read_text())
    assert run["status"] == "finished"
    assert "error" not in run


def readable(out: Path) -> None:
    """Every file of the folder is whole, whatever happened to the run."""
    assert json.loads((out / "run.json").read_text())["config"]["delay"] == 2
    for path in out.rglob("[!.]*.parquet"):
        assert len(pl.read_parquet(path)) > 0
    checkpoint.load(out)


def killed(model: Path, out: Path, kind: str, after: float) -> int:
    """Kill a run some seconds after it made its folder; how many steps its table has."""
    command = [sys.executable, str(kill_me.__file__), str(model), str(out), kind]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=os.environ | {
        "PYTHONPATH": str(Path(__file__).parents[3])
    })  # fmt: skip
    deadline = time.monotonic() + 120
    while not (out / "run.json").exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.005)
    time.sleep(after)
    process.send_signal(signal.SIGKILL)
    process.wait()
    readable(out)
    return len(pl.read_parquet(out / "steps.parquet")) if (out / "steps.parquet").exists() else 0


def test_resumed_run_is_bitwise_the_uninterrupted_one_after_a_kill(folder, exact_engine, whole, tmp_path):
    steps = killed(folder, tmp_path / "run", "exact", after=float(np.random.default_rng(0).uniform(0.3, 0.8)))
    assert steps < kill_me.CONFIG["steps"]  # it was killed before its end
    same(tmp_path / "run", kill_me.run(folder, tmp_path / "run", "exact", exact_engine), whole)


@pytest.mark.slow
@pytest.mark.parametrize("point", range(10))
def test_ten_random_kill_points(folder, exact_engine, whole, tmp_path, point):
    rng = np.random.default_rng([1, point])
    for _ in range(2):  # killed, and killed again while it goes on
        killed(folder, tmp_path / "run", "exact", after=float(rng.uniform(0, 1.2)))
    same(tmp_path / "run", kill_me.run(folder, tmp_path / "run", "exact", exact_engine), whole)


@pytest.mark.slow
def test_vllm_draws_the_same_tokens_after_a_kill(folder, tmp_path):
    want = kill_me.run(folder, tmp_path / "whole", "vllm")
    assert killed(folder, tmp_path / "run", "vllm", after=2.0) < kill_me.CONFIG["steps"]
    same(tmp_path / "run", kill_me.run(folder, tmp_path / "run", "vllm"), (tmp_path / "whole", want))


def test_vllm_draws_the_same_tokens_when_resumed(folder, engines, tmp_path):
    def interrupt(row):
        if row["step"] == 4:
            raise KeyboardInterrupt

    want = kill_me.run(folder, tmp_path / "whole", "vllm", engines("float32"))
    with pytest.raises(KeyboardInterrupt):
        kill_me.run(folder, tmp_path / "run", "vllm", engines("float32"), interrupt)
    readable(tmp_path / "run")
    steps = kill_me.run(folder, tmp_path / "run", "vllm", engines("float32"))
    same(tmp_path / "run", steps, (tmp_path / "whole", want))


@contextmanager
def file_sizes_restored():
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("size", [500_000, 100])  # the checkpoint does not fit; nothing does
def test_a_full_disk_leaves_a_run_that_can_go_on(folder, exact_engine, whole, tmp_path, size):
    with file_sizes_restored(), pytest.raises(BadInput, match=r"cannot write .*run"):
        kill_me.run(
            folder, tmp_path / "run", "exact", exact_engine,
            lambda row: row["step"] == 3 and resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY)),
        )  # fmt: skip
    readable(tmp_path / "run")
    assert not list(tmp_path.rglob("*.tmp"))
    same(tmp_path / "run", kill_me.run(folder, tmp_path / "run", "exact", exact_engine), whole)


def test_a_crashed_engine_leaves_a_run_that_can_go_on(folder, engines, tmp_path, monkeypatch):
    llm = engines("float32")
    want = kill_me.run(folder, tmp_path / "whole", "vllm", llm)
    real, calls = llm.generate, []

    def dies(*args, **kwargs):
        calls.append(1)
        if len(calls) > 12:
            raise RuntimeError("out of memory")
        return real(*args, **kwargs)

    monkeypatch.setattr(llm, "generate", dies)
    with pytest.raises(BadInput, match="engine failed while sampling: out of memory"):
        kill_me.run(folder, tmp_path / "run", "vllm", llm)
    monkeypatch.setattr(llm, "generate", real)
    readable(tmp_path / "run")
    run = json.loads((tmp_path / "run" / "run.json").read_text())
    assert (run["status"], run["error"]) == ("failed", "engine failed while sampling: out of memory")
    assert 0 < len(pl.read_parquet(tmp_path / "run" / "steps.parquet")) < kill_me.CONFIG["steps"]
    same(tmp_path / "run", kill_me.run(folder, tmp_path / "run", "vllm", llm), (tmp_path / "whole", want))


def test_a_run_goes_on_only_with_its_own_config_and_a_whole_checkpoint(folder, exact_engine, whole, tmp_path):
    config = train.RunConfig(**kill_me.CONFIG | {"seed": 5, "delay": 1}, engine=kill_me.config("exact").engine)
    learner = train.learner(folder, config)
    with pytest.raises(BadInput, match="made with another config, it differs in: seed, delay"):
        train.train(config, exact_engine, learner, whole[0], resume=True)
    with pytest.raises(BadInput, match="is not empty; a run is never overwritten"):
        kill_me.run(folder, whole[0], "exact", exact_engine, resume=False)
    out = tmp_path / "run"
    out.mkdir()
    (out / "run.json").write_bytes((whole[0] / "run.json").read_bytes())
    (out / checkpoint.FILE).write_bytes((whole[0] / checkpoint.FILE).read_bytes()[:-1000])
    with pytest.raises(BadInput, match=r"checkpoint\.pt is damaged"):
        kill_me.run(folder, out, "exact", exact_engine)


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")  # of the pickle that the test makes
def test_a_checkpoint_is_never_executed(tmp_path):
    import pickle

    class Evil:
        def __reduce__(self):
            return (Path(tmp_path / "pwned").touch, ())

    (tmp_path / checkpoint.FILE).write_bytes(pickle.dumps(Evil()))
    with pytest.raises(BadInput, match="is damaged"):
        checkpoint.load(tmp_path)
    assert not (tmp_path / "pwned").exists()


def test_a_finished_run_is_left_as_it_is(folder, exact_engine, whole):
    assert kill_me.run(folder, whole[0], "exact", exact_engine).equals(whole[1])
    same(whole[0], whole[1], whole)
