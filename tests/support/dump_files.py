"""Dumps as the frameworks write them, made from plain responses; nothing of the readers is used here."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import torch


def responses(n: int = 12, seed: int = 0, least: int = 2, most: int = 9) -> list[dict[str, Any]]:
    """Responses to three prompts: ids, log-probabilities of two engines (float32 values), a mask with holes."""
    rng = np.random.default_rng(seed)
    prompts = [rng.integers(5, 99, size=int(k)).tolist() for k in (3, 5, 4)]
    made = []
    for i in range(n):
        length = int(rng.integers(least, most + 1))
        q = np.float32(-rng.exponential(size=length) - 1e-3)
        old = np.float32(q - 0.01 + 0.05 * rng.normal(size=length)).clip(max=np.float32(-1e-4))
        mask = (rng.random(length) < 0.8).astype(int)
        mask[0] = 1
        made.append(
            {
                "prompt": prompts[i % 3],
                "ids": rng.integers(5, 99, size=length).tolist(),
                "q": [float(x) for x in q],
                "old": [float(x) for x in old],
                "mask": mask.tolist(),
                "advantage": float(np.float32(rng.normal())),
                "reward": float(i % 2),
                "index": i,
            }
        )
    return made


def whole(response: dict[str, Any], name: str, fill: Any) -> list:
    """The values of a response behind its prompt's."""
    return [fill] * len(response["prompt"]) + list(response[name])


def canonical_rows(made: list[dict[str, Any]], step: int = 4) -> list[dict[str, Any]]:
    return [
        {
            "step": step,
            "prompt_id": i["prompt"][0],
            "sample_id": i["index"],
            "mask": [bool(m) for m in i["mask"]],
            "logp_rollout": i["q"],
            "logp_sync": None,
            "logp_train": i["old"],
            "version_rollout": step - 1,
            "version_train": step,
            "reward": i["reward"],
            "advantage": i["advantage"],
            "token_ids": i["ids"],
        }
        for i in made
    ]


def write_lines(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def write_json(folder: Path, made: list[dict[str, Any]]) -> Path:
    return write_lines(folder / "dump.jsonl", canonical_rows(made))


def write_parquet(folder: Path, made: list[dict[str, Any]]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    table = pl.DataFrame(canonical_rows(made), schema_overrides={"logp_sync": pl.List(pl.Float64)})
    table.write_parquet(folder / "dump.parquet")
    return folder / "dump.parquet"


def write_nemo(folder: Path, made: list[dict[str, Any]], step: int = 4) -> Path:
    """One padded batch; every value of a line is a batch of one."""
    width = max(len(r["prompt"]) + len(r["ids"]) for r in made)

    def padded(row: list, fill: Any = 0.0) -> list[list]:
        return [row + [fill] * (width - len(row))]

    rows = [
        {
            "content": ["text"],
            "rewards": [r["reward"]],
            "input_lengths": [len(r["prompt"]) + len(r["ids"])],
            "token_ids": padded(r["prompt"] + r["ids"], 0),
            "token_loss_mask": padded(whole(r, "mask", 0), 0),
            "sample_loss_mask": [1.0],
            "advantages": padded(whole(r, "mask", 0) and [r["advantage"]] * (len(r["prompt"]) + len(r["ids"]))),
            "generation_logprobs": padded(whole(r, "q", 0.0)),
            "prev_logprobs": padded(whole(r, "old", -1.5)),
            "idx": r["index"],
        }
        for r in made
    ]
    return write_lines(folder / f"train_data_step{step}.jsonl", rows)


def write_prime(folder: Path, made: list[dict[str, Any]], step: int = 4) -> Path:
    rows = [
        {
            "schema_version": 1,
            "step": step,
            "rank": 0,
            "micro_step": r["index"] // 2,
            "micro_sequence_idx": r["index"] % 2,
            "export_sequence_idx": r["index"],
            "env_name": "sums",
            "token_ids": r["prompt"] + r["ids"],
            "position_ids": list(range(len(r["prompt"] + r["ids"]))),
            "loss_mask": [bool(m) for m in whole(r, "mask", 0)],
            "advantages": [r["advantage"]] * len(r["prompt"] + r["ids"]),
            "inference_logprobs": whole(r, "q", 0.0),
            "trainer_logprobs": whole(r, "old", -1.5),
            "entropy": whole(r, "q", 0.0),
            "is_masked": [None] * len(r["prompt"] + r["ids"]),
        }
        for r in made
    ]
    return write_lines(folder / "token_exports" / f"step_{step}" / "rank_0.jsonl", rows)


def write_slime(folder: Path, made: list[dict[str, Any]], step: int = 4) -> Path:
    samples = [
        {
            "data_parallel_rank": r["index"] % 2,
            "sample_index": r["index"],
            "rollout_position": r["index"],
            "tokens": torch.tensor(r["prompt"] + r["ids"]),
            "response_lengths": len(r["ids"]),
            "total_lengths": len(r["prompt"] + r["ids"]),
            "loss_masks": torch.tensor(r["mask"], dtype=torch.int),
            "rollout_log_probs": torch.tensor(r["q"]),
            "log_probs": torch.tensor(r["old"]),
            "advantages": torch.full((len(r["ids"]),), r["advantage"]),
            "rewards": r["reward"] - 0.5,
        }
        for r in made
    ]
    content = {"format_version": 2, "rollout_id": step, "rank": 0, "samples": samples, "dp_shards": []}
    return save(folder / f"{step}.pt", content | {"raw_reward": [r["reward"] for r in made]})


def write_miles(folder: Path, made: list[dict[str, Any]], step: int = 4) -> Path:
    data = {
        "tokens": [torch.tensor(r["prompt"] + r["ids"]) for r in made],
        "response_lengths": [len(r["ids"]) for r in made],
        "loss_masks": [torch.tensor(r["mask"], dtype=torch.int) for r in made],
        "rollout_log_probs": [torch.tensor(r["q"]) for r in made],
        "log_probs": [torch.tensor(r["old"]) for r in made],
        "advantages": [torch.full((len(r["ids"]),), r["advantage"]) for r in made],
        "sample_indices": [r["index"] for r in made],
        "raw_reward": [r["reward"] for r in made],
        "weight_versions": [["3", "3"] for _ in made],
    }
    content = {"rollout_id": step, "rank": 0, "rollout_data": data, "cp_rank": 0, "cp_size": 1, "qkv_format": "thd"}
    return save(folder / f"{step}_0.pt", content)


def save(path: Path, content: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(content, path)
    return path


WRITERS = {
    "canonical json": write_json,
    "canonical parquet": write_parquet,
    "nemo-rl": write_nemo,
    "prime-rl": write_prime,
    "slime": write_slime,
    "miles": write_miles,
}
