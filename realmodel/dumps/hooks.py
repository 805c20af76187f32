"""The canonical rollout table from inside verl and TRL, whose own dumps hold no log-probabilities.

verl (rollout.calculate_log_probs=True, no bypass), the trainer `RayPPOTrainer` or one derived from it:

    class Recording(RayPPOTrainer):
        def _update_actor(self, batch):
            hooks.verl(Path("dump"), batch, step=self.global_steps, lag=0)
            return super()._update_actor(batch)

TRL (use_vllm=True):

    class Recording(GRPOTrainer):
        def _generate_and_score_completions(self, inputs):
            output = super()._generate_and_score_completions(inputs)
            if self.model.training:
                hooks.trl(Path("dump"), output, self.state.global_step, self.accelerator.process_index, lag=0)
            return output

Then `mismatch diagnose dump`. `lag` is the caller's word for how many updates the sampler is behind; without it the
versions are null, and the diagnosis will not call anything lag or numerics. Old log-probabilities are the trainer's
before the update, and stand as `logp_train` too.
"""

from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from sandbox.diagnosis.dumps import digest
from sandbox.errors import BadInput
from sandbox.output import run_folder


def verl(folder: Path, batch: Any, step: int, lag: int | None = None) -> Path:
    """Write a verl DataProto (tensors (B, T) under `batch`, objects under `non_tensor_batch`) before its update."""
    tensors = batch.batch
    columns = {
        "logp_rollout": _need(tensors, "rollout_log_probs"),
        "logp_train": _need(tensors, "old_log_probs"),
        "logp_old": tensors["old_log_probs"],
        "token_ids": tensors["responses"],
        "advantage": tensors["advantages"],
    }
    reward = tensors["token_level_scores"].sum(-1)
    return _write(folder, columns, tensors["response_mask"], reward, batch.non_tensor_batch["uid"], step, 0, lag)


def trl(folder: Path, output: Any, step: int, rank: int = 0, lag: int | None = None) -> Path:
    """Write what TRL's GRPOTrainer made of one process's completions, tensors (B, T)."""
    columns = {
        "logp_rollout": _need(output, "sampling_per_token_logps"),
        "logp_train": _need(output, "old_per_token_logps"),
        "logp_old": output["old_per_token_logps"],
        "token_ids": output["completion_ids"],
    }
    mask = output["completion_mask"] * output.get("tool_mask", 1)
    ids, real = _array(output["prompt_ids"]), _array(output["prompt_mask"]) > 0
    prompts = [digest(row[kept]) for row, kept in zip(ids, real, strict=True)]
    advantage = output["advantages"]
    columns["advantage"] = advantage[:, None].expand(mask.shape) if advantage.ndim == 1 else advantage
    return _write(folder, columns, mask, None, prompts, step, rank, lag)


def _write(
    folder: Path, columns: dict[str, Any], mask: Any, reward: Any, prompts: Any, step: int, rank: int, lag: int | None
) -> Path:
    """A new rollouts/step-*.parquet: every response up to its last counted token, for there padding starts."""
    if lag is not None and not 0 <= lag <= step:
        raise BadInput(f"lag is {lag} at step {step}: the sampler's weights would be newer, or from before the start")
    counted = _array(mask) != 0
    lengths = np.where(counted.any(-1), counted.shape[1] - counted[:, ::-1].argmax(-1), 0)

    def ragged(values: np.ndarray) -> list[np.ndarray]:
        return [row[:length] for row, length in zip(values, lengths, strict=True)]

    named = f"step-{step:06d}-rank-{rank:04d}"
    part = len(list((folder / "rollouts").glob(f"{named}-*.parquet")))
    table = pl.DataFrame(
        {name: ragged(_array(values)) for name, values in columns.items()}
        | {
            "mask": ragged(counted),
            "step": step,
            "rank": rank,
            "prompt_id": [str(prompt) for prompt in prompts],
            "sample_id": [f"{rank}:{part}:{i}" for i in range(len(lengths))],
            "reward": np.full(len(lengths), np.nan) if reward is None else _array(reward),
            "version_train": None if lag is None else step,
            "version_rollout": None if lag is None else step - lag,
        }
    )
    path = folder / "rollouts" / f"{named}-{part:04d}.parquet"
    run_folder.write_table(path, table)
    return path


def _need(tensors: Any, name: str) -> Any:
    if name not in tensors.keys():  # `in` of a TensorDict is not of its keys
        raise BadInput(f"{name} is not in the batch: verl needs rollout.calculate_log_probs=True, TRL use_vllm=True")
    return tensors[name]


def _array(value: Any) -> np.ndarray:
    value = value.detach().cpu()
    return (value.double() if value.is_floating_point() else value).numpy()
