"""Which correction, on this dump's own ratios: bias and noise of each, simulated, best first."""

import math

import numpy as np

from sandbox import diagnostics
from sandbox.batch import Batch
from sandbox.corrections import CORRECTIONS
from sandbox.errors import BadInput
from sandbox.evidence import Evidence

RANKED_TOKENS, RANKED_RESPONSES = 400_000, 2048


def rank_corrections(evidence: Evidence, resynced: bool) -> list[dict]:
    """Corrections by what they would do to this dump's own ratios, best first.

    Per response, w is a correction's weight (mean over its tokens) and W the exact one, the whole product, both scaled
    to the same mean. Of an advantage anywhere in [-1, 1] the update's relative bias is at most mean|w - W|, its noise
    at most sqrt(mean w^2 / n) with n responses a step; `error` is their root sum of squares. Where W's own ESS is
    flattered (Pareto k above its limit) so is the ranking.
    """
    batch, responses = _batch(evidence, resynced)
    if batch is None:
        return []
    steps = np.unique(evidence.responses["step"])
    per_step = max(len(evidence.responses["n"]) / len(steps), 1.0)
    exact = np.exp(np.asarray(diagnostics.sequence_log_weight(batch)) - _log_mean(batch))
    counted = batch.mask.sum(axis=1)
    rows = []
    for name, rule in CORRECTIONS.items():
        try:
            corrected = rule(batch)
        except BadInput:  # needs what a dump does not hold: whole distributions, or logp_sync
            continue
        weight = np.where(corrected.keep & batch.mask, corrected.weight, 0.0).sum(axis=1) / counted
        scale = weight.mean()
        if not scale > 0:
            continue
        scaled = weight / scale
        bias, noise = float(np.abs(scaled - exact).mean()), math.sqrt(float(np.mean(scaled**2)) / per_step)
        rejected = float((batch.mask & ~np.broadcast_to(corrected.keep, batch.mask.shape)).sum() / counted.sum())
        rows.append(
            {
                "correction": name,
                "rule": str(rule),
                "bias": bias,
                "noise": noise,
                "error": math.hypot(bias, noise),
                "rejected_share_of_tokens": rejected,
                "n": len(responses),
                "responses_per_step": per_step,
            }
        )
    return sorted(rows, key=lambda row: row["error"])


def _log_mean(batch: Batch) -> float:
    log_weight = np.asarray(diagnostics.sequence_log_weight(batch))
    top = log_weight.max()
    return float(top + math.log(np.mean(np.exp(log_weight - top)))) if np.isfinite(top) else 0.0


def _batch(evidence: Evidence, resynced: bool) -> tuple[Batch | None, np.ndarray]:
    """Some of the sampled responses, padded on the right."""
    sample = evidence.sample.where(np.isfinite(evidence.sample.train))
    which, index, counts = np.unique(sample.response, return_inverse=True, return_counts=True)
    if not len(which):
        return None, which
    width = np.maximum.accumulate(counts)
    rows = min(
        int(np.searchsorted(width * np.arange(1, len(which) + 1), RANKED_TOKENS, side="right")), RANKED_RESPONSES
    )
    rows = max(rows, 1)
    place = np.arange(len(sample)) - (np.cumsum(counts) - counts)[index]
    some = index < rows
    shape = (rows, int(counts[:rows].max()))
    mask = np.zeros(shape, bool)
    mask[index[some], place[some]] = True

    def padded(values: np.ndarray) -> np.ndarray:
        table = np.zeros(shape)
        table[index[some], place[some]] = values[some]
        return table

    sync = padded(sample.sync) if resynced and np.isfinite(sample.sync[some]).all() else None
    old = padded(sample.old) if np.isfinite(sample.old[some]).all() else None
    advantage = evidence.responses["advantage"][which[:rows]]
    advantage = np.where(np.isnan(advantage), 1.0, advantage)[:, None]
    return Batch(padded(sample.train), padded(sample.rollout), mask, advantage, sync, old), which[:rows]
