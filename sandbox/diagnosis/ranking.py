"""Which correction, on this dump's own ratios: bias and noise of each, simulated, least mean squared error first."""

import math

import numpy as np

from sandbox.batch import Batch
from sandbox.corrections import CORRECTIONS
from sandbox.diagnosis.evidence import Evidence
from sandbox.errors import BadInput
from sandbox.metrics import estimators

RANKED_TOKENS, RANKED_RESPONSES = 400_000, 4096


def rank_corrections(evidence: Evidence, resynced: bool) -> list[dict]:
    """Corrections by the mean squared error of the update that they would make of this dump's responses, best first.

    Simulated is the component of the update along the direction in which the trainer moved away from the sampler, for
    that is where weights and scores go together: u = A sum_t w_t s_t with the response's advantage A (its reward less
    the mean where the dump has none, else 1), s_t the token's log ratio less the mean. Each rule's w is scaled to mean
    1, as its scale is a step size. The target is mean(W A sum_t s_t), W the whole product, mean 1. With n responses a
    step: bias = |mean u - target|, noise = sqrt(Var u / n), error = sqrt(bias^2 + noise^2), all in units of the noise
    that n fresh on-policy responses would have. W is unbiased by construction, so it wins only where its noise lets
    it; and where its ESS is flattered (Pareto k above its limit), so is its rank.
    """
    batch, which = _batch(evidence, resynced)
    if batch is None:
        return []
    log_weight = np.asarray(estimators.sequence_log_weight(batch))
    exact = np.exp(log_weight - log_weight.max())
    exact /= exact.mean()
    t = np.where(batch.mask, batch.logp_train - batch.logp_rollout, 0.0)
    score = np.where(batch.mask, t - t[batch.mask].mean(), 0.0)
    advantage = batch.advantage[:, 0] / max(np.abs(batch.advantage).max(), 1e-300)  # its scale cancels
    steps = len(np.unique(evidence.responses["step"]))
    n = max(len(evidence.responses["n"]) / steps, 1.0)
    fresh = advantage * score.sum(axis=1)
    target = float(np.mean(exact * fresh))
    unit = math.sqrt(float(np.mean(exact * (fresh - target) ** 2)) / n)
    if not unit > 1e-12:
        return []
    rows = []
    for name, rule in CORRECTIONS.items():
        try:
            corrected = rule(batch)
        except BadInput:  # needs what a dump does not hold: whole distributions, or logp_sync
            continue
        keep = np.broadcast_to(corrected.keep, batch.mask.shape) & batch.mask
        weight = np.where(keep, corrected.weight, 0.0)
        scale = weight.sum() / batch.mask.sum()
        if not scale > 0:
            continue
        update = advantage * (weight * score).sum(axis=1) / scale
        bias, noise = abs(float(update.mean()) - target) / unit, math.sqrt(float(update.var()) / n) / unit
        rows.append(
            {
                "correction": name,
                "rule": str(rule),
                "bias": bias,
                "noise": noise,
                "error": math.hypot(bias, noise),
                "rejected_share_of_tokens": 1 - float(keep.sum() / batch.mask.sum()),
                "n": len(which),
                "responses_per_step": n,
            }
        )
    return sorted(rows, key=lambda row: row["error"])


def _batch(evidence: Evidence, resynced: bool) -> tuple[Batch | None, np.ndarray]:
    """Some of the sampled responses, taken evenly from all of them, padded on the right."""
    sample = evidence.sample.where(np.isfinite(evidence.sample.train))
    which, counts = np.unique(sample.response, return_counts=True)
    if len(which) < 2:
        return None, which
    rows = min(len(which), RANKED_RESPONSES, max(RANKED_TOKENS // int(counts.max()), 2))
    which = which[np.linspace(0, len(which) - 1, rows).astype(int)]
    sample = sample.where(np.isin(sample.response, which))
    index, counts = np.unique(sample.response, return_inverse=True, return_counts=True)[1:]
    place = np.arange(len(sample)) - (np.cumsum(counts) - counts)[index]
    mask = np.zeros((rows, int(counts.max())), bool)
    mask[index, place] = True

    def padded(values: np.ndarray) -> np.ndarray:
        table = np.zeros(mask.shape)
        table[index, place] = values
        return table

    sync = padded(sample.sync) if resynced and np.isfinite(sample.sync).all() else None
    old = padded(sample.old) if np.isfinite(sample.old).all() else None
    advantage, reward = evidence.responses["advantage"][which], evidence.responses["reward"][which]
    if np.isnan(advantage).any():
        advantage = np.ones(rows) if np.isnan(reward).any() else reward - reward.mean()
    return Batch(padded(sample.train), padded(sample.rollout), mask, advantage[:, None], sync, old), which
