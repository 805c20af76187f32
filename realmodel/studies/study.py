"""A study: several real-model runs from one start, one after the other, resumable; what is there is not done again.

The start is a run of its own, on-policy, that brings a freshly built policy to where the others begin; every other run
starts from its last checkpoint, optimiser included. Engines are started when a run first needs them, and stay.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import polars as pl

from realmodel.engine import sampler
from realmodel.engine.sampler import EngineConfig
from realmodel.policy import small
from realmodel.training import checkpoint
from realmodel.training.settings import RunConfig, learner
from realmodel.training.train import train
from sandbox.corrections import CORRECTIONS, EveryK
from sandbox.errors import BadInput

START = "start"  # name of the run that the others start from
Progress = Callable[[str, int], None]  # what is happening, and how many updates it has just finished


def carry_out(start: RunConfig, runs: Mapping[str, RunConfig], folder: Path, progress: Progress) -> None:
    """Do the start and every run, each in `folder`/its name; finished ones are left as they are, begun ones go on.

    Args:
        start: by an engine of its own; runs of another model have a start of that model, by the same settings.
        runs: by name.
        folder: of the study.
    """
    for model in dict.fromkeys([start.model, *(config.model for config in runs.values())]):
        mine = {name: config for name, config in runs.items() if config.model == model}
        name = START if model == start.model else f"{START}-{model.replace('/', '-')}"
        _carry_out(replace(start, model=model), name, mine, folder, progress)


def _carry_out(
    start: RunConfig, start_name: str, runs: Mapping[str, RunConfig], folder: Path, progress: Progress
) -> None:
    path = small.resolve(start.model, start.task)
    pupil, engines = learner(path, start), {}

    def go(name: str, config: RunConfig) -> None:
        if status(folder / name) == "finished":
            progress(name, config.steps)
            return
        if config.engine not in engines:
            progress(f"starting an engine in {config.engine.dtype}", 0)
            engines[config.engine] = sampler.start(path, config.engine)
        begun = (folder / name / "run.json").exists()
        train(config, engines[config.engine], pupil, folder / name, lambda row: progress(name, 1), resume=begun)

    go(start_name, start)
    at_start = final(folder / start_name)
    for name, config in runs.items():
        pupil.restore(at_start)
        go(name, config)


def status(run: Path) -> str:
    """What run.json says of a run: running, finished, interrupted, failed; "absent" without one."""
    try:
        return json.loads((run / "run.json").read_text())["status"]
    except (OSError, ValueError, KeyError, TypeError):
        return "absent"


def final(run: Path) -> dict[str, Any]:
    """`Learner.state()` at the last checkpoint of a run. Raises BadInput for none."""
    saved = checkpoint.load(run)
    if saved is None:
        raise BadInput(f"run folder {run} has no checkpoint")
    return saved.learner


def steps_of(folder: Path, names: list[str]) -> dict[str, pl.DataFrame]:
    """The steps tables of those of the runs that have finished."""
    done = [name for name in names if status(folder / name) == "finished"]
    return {name: pl.read_parquet(folder / name / "steps.parquet") for name in done}


def on_policy_start(base: RunConfig, updates: int, engine: EngineConfig) -> RunConfig:
    """The run that everything starts from: fresh samples at every update, with a warm-up."""
    return replace(
        base,
        correction=CORRECTIONS["none"],
        resync=EveryK(1),
        seed=1000,
        steps=updates,
        warmup=min(10, updates),
        probe=0,
        engine=engine,
    )
