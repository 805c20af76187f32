"""TOML in and out, run folders that are never reused or half-written, JSON without nan."""

import errno
import json
import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import polars as pl
import pytest

from sandbox.corrections import CORRECTIONS, DLC, RESYNCS, Correction, EssBelow, EveryK, Resync, Truncate
from sandbox.errors import BadInput
from sandbox.output import config, run_folder


@dataclass(frozen=True)
class Inner:
    dtype: str = "float32"


@dataclass(frozen=True)
class Example:
    seed: int = 0
    rate: float = 1e-4
    correction: Correction = CORRECTIONS["none"]
    resync: Resync = RESYNCS["never"]
    engine: Inner = Inner()


def load(tmp_path: Path, text: str) -> Example:
    path = tmp_path / "run.toml"
    path.write_text(text)
    return config.load(path, Example)


def test_presets_and_changed_presets(tmp_path: Path):
    made = load(tmp_path, 'correction = "dlc"\nresync = {preset = "every", k = 7}\n[engine]\ndtype = "bfloat16"')
    assert made == Example(correction=DLC(), resync=EveryK(7), engine=Inner("bfloat16"))
    made = load(tmp_path, 'correction = {preset = "seq_tis", cap = inf}')
    assert made.correction == Truncate("sequence", math.inf)


@pytest.mark.parametrize("name", CORRECTIONS)
@pytest.mark.parametrize("rule", RESYNCS)
def test_resolved_config_reads_back_to_the_same(name: str, rule: str):
    made = Example(correction=CORRECTIONS[name], resync=RESYNCS[rule])
    plain = config.resolved(made)
    assert plain["correction"]["preset"] == name
    assert plain["resync"]["preset"] == rule
    assert config.structure(json.loads(json.dumps(plain)), Example) == made
    changed = config.resolved(Example(correction=Truncate("token", 3.5), resync=EssBelow(0.3)))
    assert config.structure(changed, Example) == Example(correction=Truncate("token", 3.5), resync=EssBelow(0.3))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("sed = 1", "sed"),
        ('correction = "dcl"', "unknown correction 'dcl', known: none, tis"),
        ('resync = "sometimes"', "unknown resync 'sometimes'"),
        ('correction = {preset = "dlc", capp = 2.0}', "unknown key capp in correction 'dlc'"),
        ("correction = 3", "a correction is a preset's name or a table"),
        ('rate = "fast"', "'fast' is not of type float at rate"),
        ("seed = 1.5", "1.5 is not of type int at seed"),
        ("seed = true", "True is not of type int at seed"),
        ("engine = {dtype = 16}", "16 is not of type str at engine.dtype"),
        ('[engine]\ndtpye = "float32"', "dtpye"),
        ("seed = ", "is not TOML"),
        ('correction = {preset = "dlc", level = "segment"}', "'segment' is none of 'token', 'sequence'"),
        ('resync = {preset = "every", k = 0}', "k is 0, expected at least 1"),
    ],
)
def test_bad_configs_are_one_line_that_names_the_field(tmp_path: Path, text: str, message: str):
    with pytest.raises(BadInput) as error:
        load(tmp_path, text)
    assert message in str(error.value)
    assert "\n" not in str(error.value)
    assert "run.toml" in str(error.value)


def test_missing_config(tmp_path: Path):
    with pytest.raises(BadInput, match=r"none\.toml cannot be read: No such file"):
        config.load(tmp_path / "none.toml", Example)


def test_a_run_folder_is_never_reused(tmp_path: Path):
    folder = run_folder.create_run(tmp_path / "a", {"seed": 3, "cap": math.inf, "gap": math.nan})
    run = json.loads((folder / "run.json").read_text())
    assert run["config"] == {"seed": 3, "cap": "inf", "gap": None}
    assert run["schema_version"] == run_folder.SCHEMA_VERSION
    assert run["versions"]["numpy"]
    before = (folder / "run.json").read_bytes()
    with pytest.raises(BadInput, match="not empty; a run is never overwritten"):
        run_folder.create_run(folder, {})
    assert (folder / "run.json").read_bytes() == before
    run_folder.finish_run(folder, syncs=2)
    done = json.loads((folder / "run.json").read_text())
    assert (done["status"], done["syncs"], done["config"]) == ("finished", 2, run["config"])


def test_a_file_in_the_place_of_the_folder(tmp_path: Path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(BadInput, match="cannot be made"):
        run_folder.create_run(tmp_path / "file", {})


def test_tables_keep_nan_inf_and_null_apart(tmp_path: Path):
    table = pl.DataFrame({"x": [math.nan, math.inf, None, -1.0]})
    run_folder.write_table(tmp_path / "t.parquet", table)
    assert pl.read_parquet(tmp_path / "t.parquet").equals(table)


def test_a_full_disk_is_one_line_and_leaves_the_old_file(tmp_path: Path, monkeypatch):
    path = tmp_path / "steps.parquet"
    run_folder.write_table(path, pl.DataFrame({"x": [1]}))
    before = path.read_bytes()

    def full(self: Path, content: bytes) -> int:
        with self.open("wb") as file:
            file.write(content[: len(content) // 2])  # what a real full disk leaves behind
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(BadInput, match=r"cannot write .*steps\.parquet: No space left on device"):
        run_folder.write_table(path, pl.DataFrame({"x": [1, 2]}))
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_a_run_says_how_it_ended(tmp_path: Path):
    def status(name: str) -> dict:
        return json.loads((tmp_path / name / "run.json").read_text())

    with run_folder.recorded(tmp_path / "a", {}) as outcome:
        assert status("a")["status"] == "running"
        outcome["syncs"] = 3
    assert (status("a")["status"], status("a")["syncs"]) == ("finished", 3)
    with pytest.raises(BadInput), run_folder.recorded(tmp_path / "b", {}):
        raise BadInput("loss is nan")
    assert (status("b")["status"], status("b")["error"]) == ("failed", "loss is nan")
    with pytest.raises(KeyboardInterrupt), run_folder.recorded(tmp_path / "c", {}):
        raise KeyboardInterrupt
    assert status("c")["status"] == "interrupted"


def test_of_runs_that_want_one_folder_one_gets_it(tmp_path: Path):
    with ThreadPoolExecutor(8) as pool:
        tries = [pool.submit(run_folder.create_run, tmp_path / "run", {"try": i}) for i in range(8)]
    errors = [done.exception() for done in tries]
    assert sum(error is None for error in errors) == 1
    assert all(error is None or "never overwritten" in str(error) for error in errors)
    winner = errors.index(None)
    assert json.loads((tmp_path / "run" / "run.json").read_text())["config"] == {"try": winner}
    assert len(list((tmp_path / "run").iterdir())) == 1
