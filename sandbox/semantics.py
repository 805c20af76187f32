"""Semantics before statistics: do the two engines' log-probabilities mean the same thing at all?

Every test reads d = log mu - log q on the sampled tokens. What tells the causes apart is what honest log-probabilities
obey: E_q[mu / q] = 1. A restricted support makes it the kept mass, below 1, and d <= 0 at nearly every token; samples
drawn at another temperature than their log-probabilities are of make it exceed 1 while E[q / mu] = 1.
"""

import math
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from scipy.optimize import minimize_scalar
from scipy.special import log_softmax

from sandbox.rollouts import Rollouts

SEMANTIC = ("temperature", "raw_logprobs", "truncated_support", "shift", "retokenised", "weights_as_mask",
            "double_correction", "recomputed_old")  # fmt: skip
SLOPE = 0.02  # a slope of log mu on log q this far from 1 is a temperature, where it explains d
EXPLAINED = 0.5  # share of Var d that the slope must explain
MOST = 1_000_000  # tokens that the tests of means and grids read, evenly spaced
ENOUGH = 50  # tokens that a test of means needs


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong or worth knowing; `message` says what to change. Evidence carries n and units."""

    code: str
    severity: Literal["error", "warning", "info"]
    message: str
    evidence: dict[str, Any] = field(default_factory=dict)


def fit_temperature(logp: np.ndarray, other: np.ndarray) -> float:
    """T that makes softmax(logp / T) closest to the distributions `other`, in mean KL(other || .). (n, V) each."""
    p = np.exp(other)

    def divergence(log_temperature: float) -> float:
        return -float((p * log_softmax(logp / math.exp(log_temperature), axis=-1)).sum())

    fit: Any = minimize_scalar(divergence, bounds=(-4, 4), method="bounded", options={"xatol": 1e-9})
    return math.exp(float(fit.x))


def check(rollouts: Rollouts, base: np.ndarray, known: np.ndarray) -> list[Finding]:
    """Findings of meaning, in the order to repair them.

    Args:
        base: log mu where it is known, else the best stand-in, log pi. (N,)
        known: tokens whose `base` is the trainer at the sampler's weights. bool (N,)
    """
    use = rollouts.mask & (known if known.any() else rollouts.mask) & np.isfinite(base)
    some = np.flatnonzero(use)
    some = some[:: max(1, len(some) // MOST)]
    q, mu = rollouts.logp_rollout[some], base[some]
    findings = []
    shifted = shift(rollouts, base, use)
    if not shifted:
        findings += [f for f in (temperature(q, mu), truncated_support(q, mu)) if f]
    findings += [shifted] if shifted else []
    findings += rows(rollouts)
    findings += [f for name in ("logp_rollout", "logp_train") if (f := grid(name, getattr(rollouts, name)[some]))]
    return findings + [f for f in (recomputed_old(rollouts), double_correction(rollouts)) if f]


def temperature(q: np.ndarray, mu: np.ndarray) -> Finding | None:
    """`temperature` or `raw_logprobs`: log mu runs along log q with a slope that is not 1."""
    if len(q) < ENOUGH or np.var(q) < 1e-8:
        return None
    d = mu - q
    slope = float(np.cov(q, mu)[0, 1] / np.var(q, ddof=1))
    left = d - (slope - 1) * (q - q.mean())
    explained = 1 - float(np.var(left) / max(np.var(d), 1e-30))
    ratio, inverse = _mean_and_error(d), _mean_and_error(-d)
    evidence = {
        "slope": slope,
        "explained_share_of_variance": explained,
        "correlation": float(np.corrcoef(q, mu)[0, 1]),
        "mean_ratio": ratio[0],
        "mean_inverse_ratio": inverse[0],
        "n_tokens": len(q),
        "direction": "log trainer on log sampler",
    }
    if abs(slope - 1) < SLOPE or explained < EXPLAINED:
        return None
    off, right = abs(ratio[0] - 1), abs(inverse[0] - 1)
    if off > 5 * ratio[1] + 0.005 and right < 4 * inverse[1] + 0.005:
        return Finding(
            "raw_logprobs",
            "error",
            "the sampler returned log-probs of another distribution than it drew from (raw, before temperature): ask"
            " for processed log-probs (vLLM: logprobs_mode=processed_logprobs)",
            evidence,
        )
    return Finding(
        "temperature",
        "error",
        f"trainer's log-probs have slope {slope:.3g} on the sampler's: divide the logits of both by one temperature",
        evidence,
    )


def truncated_support(q: np.ndarray, mu: np.ndarray) -> Finding | None:
    """d <= 0 at nearly every token and E[mu / q] < 1: q is renormalised over a top-k or top-p set."""
    d = mu - q
    if len(d) < 2:
        return None
    above = float((d > 2e-3).mean())
    mean, error = _mean_and_error(d)
    if above > 0.03 or mean > 0.99 or mean > 1 - 5 * error:
        return None
    spread = float(np.std(d))
    evidence = {"kept_mass": mean, "share_above_0": above, "sd": spread, "n_tokens": len(d), "unit": "nats"}
    return Finding(
        "truncated_support",
        "error",
        "the sampler's log-probs are renormalised over a truncated support (top-k, top-p, min-p): d is the log of the"
        f" kept mass, {'which varies by prefix: subtracting a mean d does not repair it; ' if spread > 1e-3 else ''}"
        "sample without truncation, or replay the sampling mask in the trainer",
        evidence,
    )


def shift(rollouts: Rollouts, base: np.ndarray, use: np.ndarray) -> Finding | None:
    """One list is the other moved by one place."""
    q, row = rollouts.logp_rollout, rollouts.row
    pair = use[1:] & use[:-1] & (row[1:] == row[:-1])
    if pair.sum() < 3 or np.var(q[use]) < 1e-8:
        return None
    here = float(np.abs(base - q)[use].mean())
    left = float(np.abs(base[:-1] - q[1:])[pair].mean())  # base[i] = q[i + 1]
    right = float(np.abs(base[1:] - q[:-1])[pair].mean())
    best, way = min((left, "left"), (right, "right"))
    if here < 0.05 or best > 0.3 * here:
        return None
    return Finding(
        "shift",
        "error",
        f"trainer's log-probs are shifted {way} by 1: align labels with the sampled tokens",
        {"aligned_mean_abs": best, "mean_abs": here, "n_tokens": int(pair.sum()), "unit": "nats"},
    )


REFUSED = {
    "observation_tokens": "mask tool and observation tokens: the sampler did not draw them",
    "ids_differ": "train on the sampler's token ids; never decode and encode again",
    "lengths_differ": "write log-probs and ids of one length",
    "placeholder": "mask tokens without a log-prob (nulls, an appended EOS) instead of writing a number",
    "nonfinite": "find out why an engine returned nan, or -inf for a sampled token: its logits are in doubt",
    "positive_logprob": "a log-prob above 0 is a defect of whoever computed it",
    "negative_lag": "a response cannot come from a later version than its consumer: correct the stamps",
    "duplicate": "write every sample once",
    "empty": "drop responses without a counted token",
    "malformed": "some rows do not have the columns' types",
    "mixed_schema": "some rows lack the log-probs of an engine: keep one schema a file",
    "unreadable": "the file is damaged or cut short",
}


def rows(rollouts: Rollouts) -> list[Finding]:
    """One finding for every reason rows or tokens were refused; an error beyond a few of them."""
    findings = []
    n = rollouts.n + len({r.sample_id for r in rollouts.refused if not r.tokens})
    for code, what in REFUSED.items():
        found = [r for r in rollouts.refused if r.code == code]
        if found:
            hit = len(found)
            many = code != "empty" and hit > max(0.05 * n, 1)
            evidence = {"rows": hit, "of": n, "tokens": sum(r.tokens for r in found), "first": found[0].reason}
            findings.append(Finding(code, "error" if many else "warning", what, evidence))
    if weighted := rollouts.notes.get("weights_as_mask"):
        what = "the mask holds numbers other than 0 and 1 (sample weights?): they are read as 1, not as weights"
        findings.append(Finding("weights_as_mask", "error", what, {"rows": weighted, "of": n}))
    return findings


def grid(name: str, x: np.ndarray) -> Finding | None:
    """Values that all sit on the bfloat16 grid were stored (or computed) in 8 bits of precision."""
    x = x[(x != 0) & np.isfinite(x)]
    if len(x) < 20 or len(np.unique(x)) < 10:
        return None
    on = float(((x.astype(np.float32).view(np.uint32) & 0xFFFF) == 0).mean())
    if on < 0.95:
        return None
    step = float(np.mean(2.0 ** (np.floor(np.log2(np.abs(x))) - 7)))
    return Finding(
        "low_precision_grid",
        "warning",
        f"{name} lies on the bfloat16 grid, {step:.2g} nats apart on average: nothing smaller can be seen; compute the"
        " head and store log-probs in float32 in both engines (in one of them alone can make it worse)",
        {"column": name, "resolution": step, "share_on_grid": on, "n_tokens": len(x), "unit": "nats"},
    )


def lags(rollouts: Rollouts) -> np.ndarray:
    """Versions between generation and consumption of each token; nan where unknown. (N,)"""
    return np.repeat(rollouts.rows["version_train"], np.diff(rollouts.starts)) - rollouts.version_rollout


def recomputed_old(rollouts: Rollouts) -> Finding | None:
    """`logp_sync` or `logp_old` equal to `logp_train` although the weights moved: computed at current weights."""
    stale = rollouts.mask & (lags(rollouts) > 0)
    if stale.sum() < 1:
        return None
    pi, moved = rollouts.logp_train[stale], rollouts.logp_rollout[stale] != rollouts.logp_train[stale]
    # beside a true logp_sync, an "old" of the start of the batch is as it should be
    for name in ("logp_sync",) if rollouts.logp_sync is not None else ("logp_old",):
        old = getattr(rollouts, name)
        if old is not None and moved.any() and np.array_equal(old[stale], pi):
            return Finding(
                "recomputed_old",
                "warning",
                f"{name} was computed at the current weights (it equals logp_train at lag > 0): the lag hides in the"
                " mismatch ratio and clipping never acts; keep the log-probs of the version that sampled",
                {"column": name, "n_tokens": int(stale.sum())},
            )
    return None


def double_correction(rollouts: Rollouts) -> Finding | None:
    """The weight that was applied is the square of the ratio pi / q; or it will be, as "old" is the sampler's."""
    t = rollouts.logp_train - rollouts.logp_rollout
    if rollouts.weight is not None:
        use = rollouts.mask & (rollouts.weight > 0) & np.isfinite(t) & (np.abs(t) > 1e-9)
        if use.any():
            power = float(np.dot(np.log(rollouts.weight[use]), t[use]) / np.dot(t[use], t[use]))
            if abs(power - 2) < 0.1:
                return Finding(
                    "double_correction",
                    "error",
                    "the applied weight is (pi / q)^2: the correction is applied twice; drop one of the two ratios",
                    {"power": power, "n_tokens": int(use.sum())},
                )
    old = rollouts.logp_old
    if old is not None and np.array_equal(old[rollouts.mask], rollouts.logp_rollout[rollouts.mask]):
        return Finding(
            "double_correction",
            "info",
            "logp_old is the sampler's log-prob (bypass): the loss's ratio is pi / q already, a second weight on top"
            " would count it twice",
            {"n_tokens": int(rollouts.mask.sum())},
        )
    return None


def _mean_and_error(log_ratio: np.ndarray) -> tuple[float, float]:
    """Mean of e^x and its standard error."""
    with np.errstate(over="ignore"):
        w = np.exp(np.minimum(log_ratio, 50.0))
    return float(w.mean()), float(w.std() / math.sqrt(len(w)))
