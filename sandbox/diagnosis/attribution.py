"""Numerics or lag: the decomposition of the token error, what identifies it, how stale the tokens are, and tails.

t = d + g per token (THEORY section 1). Where the trainer at the sampler's weights was not recorded, tokens of lag 0
still give the mean square of d, as the intercept across lags; without either, nothing is said.
"""

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np

from sandbox.diagnosis.evidence import Evidence, Finding, Reference, mean_and_error
from sandbox.diagnosis.rollouts import MISSING

CLIP = (0.8, 1.2)  # the usual band of PPO
CERTAIN = 0.02  # 1 - p below which a token says nothing of a logit
FLOOR = 1e-14  # nats^2; float64 log-probabilities of one computation differ by less


@dataclass(frozen=True)
class Split:
    """Mean squares per token, nats^2; nan where not identifiable.

    method: "logp_sync"; "lag 0 intercept"; "none".
    n_tokens: that discrepancy and lag are means over. `total` is over all tokens whose trainer probability is not 0.
    cross_term: 2 mean(d g); nan without logp_sync (the intercept takes it for 0).
    """

    method: Literal["logp_sync", "lag 0 intercept", "none"]
    discrepancy: float
    lag: float
    total: float
    cross_term: float
    n_tokens: int

    @property
    def lag_share(self) -> float:
        both = self.discrepancy + self.lag
        return self.lag / both if both > 0 else math.nan


def split(evidence: Evidence, resynced: bool) -> Split:
    """The decomposition of everything that the dump holds.

    Args:
        resynced: whether logp_sync can be trusted to be at the sampler's weights.
    """
    sums = {name: float(evidence.responses[name].sum()) for name in ("n", "zeros", "tt", "synced", "dd", "gg", "dg")}
    n = sums["n"] - sums["zeros"]
    total = sums["tt"] / n if n else math.nan
    if resynced and (m := sums["synced"]):
        d, g, cross = sums["dd"] / m, sums["gg"] / m, 2 * sums["dg"] / m
        return Split("logp_sync", d, g, d + g + cross, cross, int(m))
    tokens, squares = evidence.by_lag.get(0, (0, 0.0))
    if tokens:
        d = squares / tokens
        return Split("lag 0 intercept", d, max(total - d, 0.0), total, math.nan, tokens)
    return Split("none", math.nan, math.nan, total, math.nan, 0)


def lag_table(evidence: Evidence, discrepancy: float) -> list[dict]:
    """By lag in versions (null: unknown): tokens, mean t^2, and the share of it that is above the discrepancy's."""
    rows = []
    for lag, (tokens, squares) in sorted(evidence.by_lag.items()):
        total = squares / tokens
        share = max(1 - discrepancy / total, 0.0) if total > 0 else math.nan
        row = {"lag": None if lag == MISSING else lag, "n_tokens": tokens, "total": total}
        rows.append(row | {"lag_share": share if lag != MISSING else math.nan})
    return rows


def versions(evidence: Evidence) -> tuple[dict, list[Finding]]:
    """How stale the tokens are, generation to consumption, and what is odd about their stamps."""
    r = evidence.responses
    known = int(r["lag_known"].sum())
    lags = [lag for lag in evidence.by_lag if lag != MISSING]
    mixed = r["mixed"].astype(bool)
    staleness = {
        "unit": "weight versions, from generation to consumption",
        "mean": float(r["lag_sum"].sum() / known) if known else math.nan,
        "max": max(lags, default=None),
        "coverage": known / evidence.n_tokens if evidence.n_tokens else math.nan,
        "n_tokens": evidence.n_tokens,
        "responses_with_mixed_versions": int(mixed.sum()),
    }
    found = []
    if known < evidence.n_tokens:
        message = f"{evidence.n_tokens - known} of {evidence.n_tokens} tokens have no version: their lag is unknown,"
        message += " not 0. Stamp every token when it is drawn; --lag N states one for all"
        numbers = {
            "coverage": staleness["coverage"],
            "n_tokens": evidence.n_tokens,
            "mean_lag_of_known": staleness["mean"],
        }
        found.append(Finding("missing_version", "warning", message, numbers))
    if mixed.any():
        message = f"more than one version drew {int(mixed.sum())} of {len(mixed)} responses (partial rollouts): their"
        message += " lag is per token, and a response's last version says too little"
        numbers = {"share_of_responses": float(mixed.mean()), "n_responses": len(mixed)}
        found.append(Finding("mixed_versions", "info", message, numbers))
    steps, trained = r["step"], r["version_train"]
    seen = steps >= 0
    if seen.any() and len(np.unique(steps[seen])) >= 3 and (trained[seen] == trained[seen][0]).all():
        if trained[seen][0] != MISSING:
            message = "version_train stays the same while the step moves, so it does not count updates and no lag can"
            message += " be read off it. Stamp the version that consumes the response"
            numbers = {"version_train": int(trained[seen][0]), "n_steps": len(np.unique(steps[seen]))}
            found.append(Finding("stuck_version", "warning", message, numbers))
    return staleness, found


def clip_budget(ref: Reference) -> tuple[dict, Finding | None]:
    """Share of tokens outside PPO's clip band by the discrepancy alone."""
    low, high = math.log(CLIP[0]), math.log(CLIP[1])
    share, error = mean_and_error(ref.tokens, ((ref.d < low) | (ref.d > high)).astype(float))
    numbers = {"band": list(CLIP), "share_of_tokens": share, "standard_error": error, "n_tokens": len(ref.d)}
    numbers["basis"] = ref.basis
    if ref.basis == "logp_train" or not share >= 0.005:
        return numbers, None
    message = f"numerics alone put {share:.1%} of the tokens outside the clip band {CLIP[0]} to {CLIP[1]}. Anchor the"
    message += " clip at the trainer (old), not at the sampler"
    return numbers, Finding("clip_budget", "warning", message, numbers)


def mixture_tail(ref: Reference) -> Finding | None:
    """Most tokens agree and a few disagree by far (MoE routing): the mean of d is the tail's, not the clean tokens'.

    d is small wherever the policy is sure, in any engine, so it is held against the doubt that is left: d / (1 - p),
    the error of a logit, over tokens with doubt.
    """
    some = ref.doubt > CERTAIN
    d = np.abs(ref.d[some]) / ref.doubt[some]
    if len(d) < 500 or (squares := float(np.sum(d * d))) == 0:
        return None
    largest = np.sort(d)[-math.ceil(0.01 * len(d)) :]
    share, median = float(np.sum(largest**2) / squares), float(np.median(d))
    if share < 0.5 or largest[-1] < 0.05 or median > 0.1 * largest[0]:
        return None
    clean = d <= max(10 * median, FLOOR)
    numbers = {
        "share_of_mean_square_in_largest_1_percent": share,
        "median_abs_logit_error_nats": median,
        "share_beyond_10_medians": float(1 - clean.mean()),
        "mean_nats": float(ref.d[some].mean()),
        "mean_of_clean_tokens_nats": float(ref.d[some][clean].mean()),
        "basis": ref.basis,
        "n_tokens": len(d),
    }
    message = f"a mixture: 1% of the tokens hold {share:.0%} of the mean square (MoE routing, kernels that switch)."
    message += " Replay the routing or mask those tokens. Do not subtract an average: it would move the clean tokens"
    return Finding("mixture_tail", "warning", message, numbers)
