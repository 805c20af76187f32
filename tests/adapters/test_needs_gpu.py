"""What needs a GPU, or a package that only installs with one: skipped here, with the command in the reason."""

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from realmodel.adapters import prime_rl_loss
from tests.adapters.test_prime_rl import sequences
from tests.adapters.test_slime import call

EXAMPLES = Path("realmodel/adapters/examples")


def needs(packages: str, gpus: int, how: str) -> pytest.MarkDecorator:
    there = torch.cuda.device_count() >= gpus and all(find_spec(name) for name in packages.split())
    return pytest.mark.skipif(not there, reason=f"needs a GPU (at least {gpus}) and {packages}: {how}")


@needs("trl vllm", 1, "pip install 'trl[vllm]==1.16.0' mismatch-sandbox, then this test")
def test_trl_with_its_own_vllm():
    command = [
        sys.executable,
        "-m",
        "realmodel.adapters.examples.trl_grpo",
        "--config",
        str(EXAMPLES / "trl_vllm.yaml"),
    ]
    subprocess.run([*command, "--max_steps", "3"], check=True)


@needs("verl vllm", 8, "pip install 'verl[vllm]==0.9.1' mismatch-sandbox; bash realmodel/adapters/examples/verl.sh")
def test_verl_trains():
    subprocess.run(["bash", str(EXAMPLES / "verl.sh"), "trainer.total_training_steps=3"], check=True)


@needs("prime_rl", 1, "in prime-rl at 559b4477: uv sync --all-extras; uv pip install mismatch-sandbox; this test")
def test_prime_rls_own_default_loss():
    from prime_rl.trainer.rl import loss as own

    config = SimpleNamespace(dppo_mask_high=0.2, dppo_mask_low=0.2, adv_tau=1.0, kl_tau=1e-3)
    for part in sequences():
        inputs = own.LossInputs(**vars(part))
        theirs = own.default_loss_fn(inputs, config).loss
        ours = prime_rl_loss.loss(inputs, "prime_rl.default", 1e-3).loss
        wanted, got = (torch.autograd.grad(x, part.trainer_logprobs)[0] for x in (theirs, ours))
        torch.testing.assert_close(got, wanted, rtol=1e-9, atol=1e-12)


@needs("slime", 1, "slime's container at 624b824a, pip install mismatch-sandbox, then this test")
def test_slimes_own_tis():
    from slime.backends.megatron_utils.loss import icepop_function, vanilla_tis_function

    for name, own in (("slime.tis", vanilla_tis_function), ("slime.icepop", icepop_function)):
        (ours, _, _), passed = call(name)
        theirs, _, _ = own(SimpleNamespace(tis_clip=2.0, tis_clip_low=0.0), **passed)
        counted = torch.cat(passed["loss_masks"]).bool()
        torch.testing.assert_close(ours[counted], theirs[counted])
