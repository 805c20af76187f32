"""What a run would need: parameters counted by hand, memory against a measured step, and what is refused."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from realmodel.engine.sampler import EngineConfig
from realmodel.studies import dryrun
from realmodel.training.train import RunConfig
from sandbox.errors import BadInput
from sandbox.output import config as configs

CONFIGS = Path(__file__).parents[3] / "realmodel/configs"
STEP = """
import sys, torch, numpy as np
from realmodel.training import train
from realmodel.policy.align import Rollout
from realmodel.engine.sampler import EngineConfig
from sandbox.corrections import CORRECTIONS
def mib(name):
    return next(int(l.split()[1]) for l in open('/proc/self/status') if l.startswith(name)) / 1024
config = train.RunConfig(probe=0, engine=EngineConfig(max_model_len=18))
learner = train.learner(sys.argv[1], config)
def step(n):
    ids = np.random.default_rng(0).integers(2, 60, (n, 18)).tolist()
    rows = [r[:9] for r in ids], [r[9:] for r in ids], [np.full(9, -2, np.float32)] * n
    rollout = Rollout(*rows, None, 1, np.arange(n), np.ones(n, bool))
    batch = train.evaluate(learner, rollout, 1, {}, np.linspace(-1, 1, n))
    train.update(config, learner, rollout, batch, CORRECTIONS["none"](batch), 1)
step(8)
before = mib('VmRSS')
step(2048)
print(mib('VmHWM') - before)
"""


def by_hand(vocabulary, hidden, inner, layers, heads=16, kv=8, size=128) -> int:
    """Tied embedding; per layer q, k, v, o, three products of the MLP, two norms and those of q and k; a last norm."""
    layer = hidden * size * (2 * heads + 2 * kv) + 3 * hidden * inner + 2 * hidden + 2 * size
    return vocabulary * hidden + layers * layer + hidden


@pytest.mark.parametrize(
    ("file", "parameters"),
    [
        ("small", by_hand(64, 64, 192, 2, 4, 2, 32)),
        ("qwen3-0.6b", by_hand(151_936, 1024, 3072, 28)),
        ("qwen3-1.7b", by_hand(151_936, 2048, 6144, 28)),
    ],
)
def test_every_config_is_planned(file, parameters):
    told = dryrun.plan(configs.load(CONFIGS / f"{file}.toml", RunConfig))
    assert told["parameters"] == parameters
    mib = parameters / 2**20
    memory = told["memory_mib"]
    assert memory["weights"] == memory["gradients"] == memory["snapshots"] == round(4 * mib)
    assert memory["adamw"] == round(8 * mib)
    assert memory["engine_weights"] == round(2 * mib)  # bfloat16
    assert told["memory_mib_sum"] == pytest.approx(sum(memory.values()), abs=6)
    assert told["fits"] == (told["memory_mib_sum"] <= told["device_memory_mib"])
    assert told["engine"]["arguments"]["logprobs_mode"] == "processed_logprobs"


def test_the_estimate_is_within_a_factor_of_two_of_a_step(folder):
    """2,048 responses of 18 tokens, forward and backward, in a process of its own: activations and logits."""
    done = subprocess.run([sys.executable, "-c", STEP, str(folder)], capture_output=True, text=True, check=True)
    config = RunConfig(model=str(folder), prompts=256, group=8, engine=EngineConfig(max_model_len=18))
    memory = dryrun.plan(config)["memory_mib"]
    assert 0.5 < float(done.stdout) / (memory["activations"] + memory["logits"]) < 2


def test_what_saves_memory_saves_it_in_the_plan():
    def memory(**more):
        return dryrun.plan(RunConfig(**more))["memory_mib"]

    plain = memory(prompts=512)
    assert memory(prompts=512, checkpointing=True)["activations"] < 0.8 * plain["activations"]
    assert memory(prompts=512, micro_batch=512)["activations"] == pytest.approx(plain["activations"] / 8, abs=1)
    assert memory(prompts=512, trainer_dtype="bfloat16")["activations"] == pytest.approx(
        plain["activations"] / 2, abs=1
    )
    assert memory(engine=EngineConfig(kind="exact"))["engine_kv_cache"] == 0


def test_refusals():
    with pytest.raises(BadInput, match=r"would be downloaded; sizes are known of Qwen/Qwen3-0\.6B, Qwen/Qwen3-1\.7B"):
        dryrun.plan(RunConfig(model="owner/name"))
    with pytest.raises(BadInput, match="model 'nowhere' is no folder"):
        dryrun.plan(RunConfig(model="nowhere"))
    with pytest.raises(BadInput, match="max_model_len is 128, but responses to task made_up may have 512 tokens"):
        dryrun.plan(RunConfig(model="Qwen/Qwen3-0.6B", task="made_up"))


def test_the_command_prints_one_object_and_makes_nothing(tmp_path):
    (tmp_path / "bad.toml").write_text("micro_batch = -1\n")

    def run(file: Path) -> subprocess.CompletedProcess:
        command = [sys.executable, "-m", "realmodel.cli", "train", str(file), "--dry-run", "--json"]
        environment = os.environ | {"PYTHONPATH": str(CONFIGS.parents[1])}
        return subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment, check=False)

    good, bad = run(CONFIGS / "qwen3-0.6b.toml"), run(tmp_path / "bad.toml")
    assert json.loads(good.stdout)["model"] == "Qwen/Qwen3-0.6B"
    assert (bad.returncode, bad.stdout) == (2, "")
    assert "micro_batch is -1" in bad.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["bad.toml"]
