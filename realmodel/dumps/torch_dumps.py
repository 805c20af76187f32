"""What slime and miles write with torch.save, as rows of the canonical table. Files of torch are pickles: untrusted.

* slime, --save-debug-train-data, format_version 2: `samples`, a dict each. Before it, and miles: `rollout_data`, a
  list a column, one file a rank. log_probs is the trainer before the update. Samples that ranks share are duplicates.
* miles, policy_loss_debug: `samples` with three policies: sampler, old and the trainer as it updates.

Response tokens are the last of `tokens`. Weight versions are of turns, not of tokens: they are used where all of a
sample are the same whole number; the trainer's own version is not in these files.
"""

import pickle
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sandbox.diagnosis.dumps import Unreadable, digest, first_line, table_of
from sandbox.diagnosis.rollouts import Refused, Table

SAMPLES = 512  # of one piece


def read(path: Path, trust: bool) -> Iterator[Table]:
    """The samples of a file in pieces.

    Raises Unreadable: code would run to open it and `trust` is False; it is not whole; it is none of the formats above.
    """
    content = _opened(path, trust)
    samples = _samples(path, content)
    whole = content if "raw_reward" in content else content.get("rollout_data", {})
    file = {"step": content.get("rollout_id"), "rank": content.get("rank"), "call": content.get("call")}
    for first in range(0, max(len(samples), 1), SAMPLES):
        values, rows, refused = [], [], []
        for row, sample in enumerate(samples[first : first + SAMPLES], first):
            try:
                values.append(_canonical(sample, file, whole.get("raw_reward")))
                rows.append(row)
            except (ValueError, TypeError, OverflowError) as error:
                refused.append(Refused(f"{path}:{row + 1}", "mixed_schema", detail=first_line(error)))
        yield table_of(str(path), np.array(rows, np.int64), values, refused)


def _opened(path: Path, trust: bool) -> dict[str, Any]:
    try:
        with warnings.catch_warnings(action="ignore"):  # about the protocol of a plain pickle, which is refused anyway
            content = torch.load(path, map_location="cpu", weights_only=not trust)
    except pickle.UnpicklingError as error:
        if "weights" in str(error).lower() or "unsupported" in str(error).lower():
            told = "it holds more than tensors and plain values, and opening it could run code: --trust-pickle opens it"
            raise Unreadable("unsafe_pickle", f"{path}: {told}") from error
        raise Unreadable("truncated_file", f"{path}: {first_line(error)}") from error
    except Exception as error:  # a damaged pickle can raise anything
        raise Unreadable("truncated_file", f"{path}: not a whole file of torch: {first_line(error)}") from error
    if not isinstance(content, dict):
        raise Unreadable("mixed_schema", f"{path} holds a {type(content).__name__}, expected a dict")
    return content


def _samples(path: Path, content: dict[str, Any]) -> list[dict[str, Any]]:
    samples, columns = content.get("samples"), content.get("rollout_data")
    if isinstance(samples, list) and all(isinstance(sample, dict) for sample in samples):
        return samples
    if not isinstance(columns, dict):
        raise Unreadable("mixed_schema", f"{path}: neither a list `samples` of dicts nor a dict `rollout_data`")
    if content.get("cp_size", 1) != 1:
        told = "one context-parallel shard: parts of responses, which cannot be put in order without the others"
        raise Unreadable("lengths_differ", f"{path} is {told}")
    lists = {k: v for k, v in columns.items() if isinstance(v, list | tuple) or (torch.is_tensor(v) and v.ndim)}
    n = max((len(lists[k]) for k in ("response_lengths", "rollout_log_probs", "log_probs") if k in lists), default=0)
    return [{k: v[i] for k, v in lists.items() if i < len(v)} for i in range(n)]


def _canonical(sample: dict[str, Any], file: dict[str, Any], raw_reward: Any) -> dict[str, Any]:
    old = _vector(sample, "log_probs", "old_log_probs")
    train = _vector(sample, "train_log_probs")
    tokens, length = _vector(sample, "tokens"), _number(sample, "response_lengths", "response_length")
    prompt = ids = None
    if tokens is not None and length is not None:
        if not 0 <= length <= len(tokens):
            raise ValueError(f"response_length is {length} of {len(tokens)} tokens")
        prompt, ids = np.split(tokens, [len(tokens) - int(length)])
    place = _number(sample, "rollout_position", "partition", "sample_index", "sample_indices")
    index = _number(sample, "index")
    named = None if place is None else f"{file['step']}:{place:.0f}"
    if (
        named is None and index is not None and "train_log_probs" in sample
    ):  # the same sample comes again in later calls
        named = f"{file['rank']}:{file['call']}:{index:.0f}"
    reward = None
    if raw_reward is not None and place is not None and 0 <= place < len(raw_reward):
        reward = _number({"": raw_reward[int(place)]}, "")
    per_token = torch.is_tensor(sample.get("advantages")) and sample["advantages"].ndim
    per_token = per_token or isinstance(sample.get("advantages"), list)
    return {
        "logp_rollout": _vector(sample, "rollout_log_probs"),
        "logp_train": old if train is None else train,
        "logp_old": old,
        "mask": _vector(sample, "loss_masks", "loss_mask", "local_loss_mask"),
        "token_ids": ids,
        "advantage": _vector(sample, "advantages") if per_token else _number(sample, "advantages"),
        "version_rollout": _version(sample.get("weight_versions")),
        "step": _number(file, "step"),
        "rank": _number(file, "rank"),
        "reward": reward,
        "sample_id": named,
        "prompt_id": digest(prompt),
    }


def _vector(sample: dict[str, Any], *names: str) -> np.ndarray | None:
    """The first of those that is there, float64. Raises ValueError for anything but numbers in a row."""
    value = next((sample[name] for name in names if sample.get(name) is not None), None)
    if value is None:
        return None
    array = value.detach().double().numpy() if torch.is_tensor(value) else np.asarray(value)
    if array.ndim != 1 or (array.dtype.kind not in "biuf" and array.size):
        raise ValueError(f"{' or '.join(names)}: expected numbers in a row, found {array.dtype} {array.shape}")
    return array.astype(float)


def _number(sample: dict[str, Any], *names: str) -> float | None:
    value = next((sample[name] for name in names if sample.get(name) is not None), None)
    if torch.is_tensor(value) and value.numel() == 1:
        value = value.item()
    if value is None or isinstance(value, bool | int | float | np.number):
        return None if value is None else float(value)
    raise ValueError(f"{' or '.join(names)} is a {type(value).__name__}, expected a number")


def _version(versions: Any) -> int | None:
    """The one version of all turns of a sample; None where they differ, since the file does not say whose tokens."""
    told = {str(v) for v in versions} if isinstance(versions, list | tuple) else {str(versions)}
    version = told.pop() if len(told) == 1 else ""
    return int(version) if version.isdecimal() else None
