"""A run that the tests kill: `python kill_me.py MODEL OUT KIND`, and what they compare it with."""

import sys
from pathlib import Path

import polars as pl

from realmodel.engine import sampler
from realmodel.engine.sampler import EngineConfig
from realmodel.training import train
from sandbox.corrections import CORRECTIONS, EveryK

# everything that a checkpoint must carry: batches under way that mix versions, two snapshots, a probe, moments of AdamW
CONFIG = dict(
    steps=10, prompts=4, group=4, probe=8, held_out=6, learning_rate=1e-3, correction=CORRECTIONS["dlc"],
    resync=EveryK(2), delay=2, segment=3,
)  # fmt: skip


def reward(learner, problem, ids) -> float:
    """An untrained model never sorts; so that updates move it, reward what it does draw."""
    return float(ids[0] % 3) - 0.5 * (len(ids) > 8)


def config(kind: str) -> train.RunConfig:
    return train.RunConfig(**CONFIG, engine=EngineConfig(kind=kind, max_model_len=192, max_num_seqs=64))


def run(model: Path, out: Path, kind: str, llm=None, progress=lambda row: None, resume: bool = True) -> pl.DataFrame:
    """The run, or the rest of it, with a fresh learner; its steps table without the seconds."""
    train._reward = reward
    llm = llm or sampler.start(model, config(kind).engine)
    steps = train.train(config(kind), llm, train.learner(model, config(kind)), out, progress, resume)
    return steps.drop("seconds", "seconds_sampling", "seconds_update")


if __name__ == "__main__":
    run(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
