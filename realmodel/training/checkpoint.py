"""A run's last whole step, for `--resume`: trainer, optimiser, sampler's weights, batches under way, random streams.

One file, written to a temporary name and renamed, so that a kill leaves the old one or the new one. It is read by
torch's loader for tensors and plain containers, which executes nothing.
"""

import dataclasses
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from realmodel.policy.align import Rollout
from realmodel.policy.model import one_line
from sandbox.errors import BadInput

FILE = "checkpoint.pt"
LISTS = ("logp", "logp_all", "token_versions", "top_ids")  # of arrays, one a response


@dataclass(frozen=True)
class Checkpoint:
    """A run between two steps.

    Args:
        step: the next one; so many are in steps.parquet.
        prompts: state of the prompts' random stream before those of the oldest batch under way were drawn.
        drawn: batches whose prompts were drawn before that.
        queue: rollouts of the batches under way, oldest first.
        snapshots: weights by version, of the last sync and of whatever drew a token under way.
        version: of the last sync.
        learner: `Learner.state()`.
    """

    step: int
    prompts: str
    drawn: int
    queue: list[Rollout]
    snapshots: dict[int, dict[str, torch.Tensor]]
    version: int
    learner: dict[str, Any]


def save(folder: Path, checkpoint: Checkpoint) -> None:
    """Replace the folder's checkpoint. Raises BadInput, the old one still whole, where it cannot be written."""
    data = {f.name: getattr(checkpoint, f.name) for f in dataclasses.fields(checkpoint)}
    data["queue"] = [_plain(rollout) for rollout in checkpoint.queue]
    temporary = folder / f".{FILE}.{os.getpid()}.tmp"
    try:
        torch.save(data, temporary)
        temporary.replace(folder / FILE)
    except (OSError, RuntimeError) as error:  # torch reports a full disk as a RuntimeError
        raise BadInput(f"cannot write {folder / FILE}: {one_line(error)}") from error
    finally:
        temporary.unlink(missing_ok=True)


def load(folder: Path) -> Checkpoint | None:
    """The folder's checkpoint, on the CPU; None where the run had no whole step. Raises BadInput for a damaged one."""
    path = folder / FILE
    if not path.exists():
        return None
    try:
        data = torch.load(path, weights_only=True, map_location="cpu")
        return Checkpoint(**data | {"queue": [_rollout(item) for item in data["queue"]]})
    except Exception as error:  # as many kinds as there are ways to damage a file
        raise BadInput(f"{path} is damaged: {one_line(error)}") from error


def _plain(rollout: Rollout) -> dict[str, Any]:
    data = {f.name: getattr(rollout, f.name) for f in dataclasses.fields(rollout)}
    for name in LISTS:
        data[name] = None if data[name] is None else [torch.from_numpy(row) for row in data[name]]
    return data | {name: torch.from_numpy(data[name]) for name in ("prompt_index", "finished")}


def _rollout(data: dict[str, Any]) -> Rollout:
    data = data | {name: data[name].numpy() for name in ("prompt_index", "finished")}
    for name in LISTS:
        data[name] = None if data[name] is None else [row.numpy() for row in data[name]]
    return Rollout(**{name: data[name] for name in (f.name for f in dataclasses.fields(Rollout))})
