"""What a run writes down: the measurements of a batch, and its rollouts as the canonical table, one response a row."""

from pathlib import Path

import numpy as np
import polars as pl
import torch
from torch import Tensor

from realmodel.policy.align import Rollout
from sandbox.batch import Batch
from sandbox.metrics import estimators
from sandbox.output import run_folder


def measured(batch: Batch, rollout: Rollout, rewards: np.ndarray, keep: Tensor) -> dict:
    """Mean reward, ESS of the lag, the split of the token error, its KL; keep: tokens the correction kept, (B, T)."""
    log_weight = estimators.sequence_log_weight(batch, "lag").double().cpu().numpy()
    split = estimators.decompose(batch)
    return {
        "reward": float(rewards.mean()),
        "batch_ess": float(estimators.ess(log_weight)),
        "batch_ess_se": estimators.ess_standard_error(log_weight, rollout.prompt_index),
        "discrepancy": split.discrepancy,
        "lag": split.lag,
        "total": split.total,
        "cross_term": split.cross_term,
        **{f"kl_sampler_train_{name}": value for name, value in estimators.kl_sampler_train(batch).items()},
        "rejected": 1 - float((batch.mask & keep).sum()) / float(batch.mask.sum()),
        "updates_behind": (batch.version_train or 0) - float(np.concatenate(rollout.versions()).mean()),
    }


def write_rollouts(folder: Path, step: int, batch: Batch, rollout: Rollout, rewards: np.ndarray) -> None:
    """rollouts/step-*.parquet of one batch of n responses, rewards (n,).

    `version_rollout` is a list where a sync fell into the generation.
    """
    lengths = [len(ids) for ids in rollout.response_ids]

    def ragged(values: Tensor) -> list[list]:
        return [row[:n] for row, n in zip(values.detach().tolist(), lengths, strict=True)]

    several = rollout.token_versions is not None
    table = pl.DataFrame(
        {
            "step": step,
            "prompt_id": rollout.prompt_index,
            "sample_id": np.arange(len(lengths)),
            "mask": ragged(batch.mask),
            "logp_rollout": ragged(batch.logp_rollout),
            "logp_sync": ragged(batch.need("logp_sync")),
            "logp_train": ragged(batch.logp_train),
            "version_rollout": [row.tolist() for row in rollout.versions()] if several else rollout.version,
            "version_train": batch.version_train,
            "reward": rewards,
            "advantage": batch.advantage[:, 0].tolist(),
            "prompt_token_ids": rollout.prompt_ids,
            "token_ids": rollout.response_ids,
            "temperature": 1.0,
        }
    )
    run_folder.write_table(folder / "rollouts" / f"step-{step:06d}.parquet", table)


@torch.no_grad()
def lag_on_probe(batch: Batch, prompt_index: np.ndarray) -> dict[str, float]:
    """Sequence ESS of the raw lag ratio r, its error, Var[log r], and k3 of KL(q || pi). Nats; prompt_index (n,)"""
    log_weight = estimators.sequence_log_weight(batch, "lag").double().cpu().numpy()
    return {
        "probe_ess": float(estimators.ess(log_weight)),
        "probe_ess_se": estimators.ess_standard_error(log_weight, prompt_index),
        "probe_var_log_ratio": float(log_weight.var()),
        "probe_token_kl": estimators.kl_sampler_train(batch)["k3"],
    }
