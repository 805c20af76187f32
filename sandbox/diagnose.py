"""What is wrong with a run: semantics first, then numerics against lag, then judgement, then one verdict.

`diagnose(rollouts)` gives what `mismatch diagnose --json` prints. Log ratios are trainer minus sampler, in nats: d (the
discrepancy), g (the lag), t = d + g. Weights are raw unless a name says otherwise; "sequence" is the product.
"""

import math
from typing import Any

import numpy as np
from scipy import stats

from sandbox import judgement, ratios, semantics
from sandbox.rollouts import Rollouts, need
from sandbox.semantics import Finding

HEALTHY_K3 = 5e-4  # nats a token
HEALTHY_ESS = 0.9
CLIP = 0.2  # half-width of the usual clip band
RESET = 0.5  # a fall of mean d^2 to below this share of the step before is a reset


def diagnose(rollouts: Rollouts) -> dict[str, Any]:
    """Verdict, findings with evidence, and the numbers behind them; keys as in the documentation of the command.

    Raises:
        BadInput: no row can be analysed.
    """
    need(rollouts)
    base, known, lag = reference(rollouts)
    mask = rollouts.mask
    findings = semantics.check(rollouts, base, known)
    t = np.where(mask, rollouts.logp_train - rollouts.logp_rollout, 0.0)
    d = np.where(mask & known, base - rollouts.logp_rollout, 0.0)
    g = np.where(mask & known, t - d, 0.0)
    split = decompose(t, d, g, mask, known, lag)
    findings += staleness(rollouts, d, mask & known, lag)
    if split["identifiable"]:
        findings += constancy(rollouts, d, mask & known)
    findings += judgement.warnings(rollouts, t, d, mask & known)
    ess = judgement.both_ess(rollouts, t)
    steps = judgement.by_step(rollouts, t, d, g, known)
    if failed := judgement.prediction_failed(steps):
        findings.append(failed)
    with np.errstate(over="ignore", invalid="ignore"):
        k = {name: float(ratios.ESTIMATORS[name](t[mask]).mean()) for name in ("k1", "k2", "k3")}
    outcome = {
        "verdict": "",
        "findings": [vars(f) for f in findings],
        "refused": [{"sample_id": r.sample_id, "reason": r.reason, "tokens": r.tokens} for r in rollouts.refused],
        "n_responses": rollouts.n,
        "n_tokens": int(mask.sum()),
        **split,
        "ess": ess,
        "kl_sampler_train": k,
        "lag_versions": lag_summary(rollouts, lag),
        "by_step": steps,
        "collapse_prediction": judgement.collapse_prediction(rollouts, g, known, lag),
        "reference_level": judgement.reference_level(k["k3"]),
    }
    outcome["verdict"] = verdict(findings, outcome)
    outcome["corrections"] = judgement.ranked(rollouts, t)
    outcome["advice"] = judgement.advice(outcome)
    return outcome


def reference(rollouts: Rollouts) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """log mu (log pi where unknown), the tokens where it is known, and their lag in versions (nan: unknown). (N,)

    Known are tokens with `logp_sync`, and tokens of lag 0, where log pi is log mu. A `logp_sync` that equals log pi at
    every token of lag > 0 was computed at the current weights and is no log mu.
    """
    lag = semantics.lags(rollouts)
    base, known = rollouts.logp_train, rollouts.mask & (lag == 0)
    sync = rollouts.logp_sync
    if sync is not None:
        fresh = rollouts.mask & np.isfinite(sync)
        stale = fresh & (lag > 0)
        if stale.any() and np.array_equal(sync[stale], rollouts.logp_train[stale]):
            fresh &= ~stale
        base, known = np.where(fresh, sync, base), known | fresh
    return base, known, lag


def decompose(t, d, g, mask, known, lag) -> dict[str, Any]:
    """Mean squares per token, nats^2. Without log mu everywhere: the intercept at lag 0, if there are such tokens."""
    with np.errstate(over="ignore", invalid="ignore"):
        total = float(np.square(t[mask]).mean())
        if known[mask].all():
            dd, gg = float(np.square(d[mask]).mean()), float(np.square(g[mask]).mean())
            cross, how = float(2 * (d * g)[mask].mean()), "log-probs of the trainer at the sampler's weights"
        elif known[mask].any() and np.isfinite(lag[mask]).all():
            dd = float(np.square(d[mask & known]).mean())
            gg, cross, how = max(total - dd, 0.0), math.nan, "intercept at lag 0; the cross term is in the lag"
        else:
            dd = gg = cross = math.nan
            how = "not identifiable: neither logp_sync nor tokens of lag 0"
    share = gg / (dd + gg) if dd + gg > 0 else math.nan
    by_lag = []
    for value in np.unique(lag[mask & np.isfinite(lag)])[:64]:
        here = mask & (lag == value)
        square = float(np.square(t[here]).mean())
        part = max(1 - dd / square, 0.0) if square > 0 else 0.0
        by_lag.append({"lag": value, "n_tokens": int(here.sum()), "total": square, "lag_share": part})
    return {
        "identifiable": not math.isnan(dd),
        "split_from": how,
        "discrepancy": dd,
        "lag": gg,
        "total": total,
        "cross_term": cross,
        "lag_share": share,
        "by_lag": by_lag,
    }


def lag_summary(rollouts: Rollouts, lag: np.ndarray) -> dict[str, Any]:
    """Versions from generation to consumption, over tokens whose stamp is known; coverage says how many those are."""
    x = lag[rollouts.mask]
    known = x[np.isfinite(x)]
    return {
        "mean": float(known.mean()) if len(known) else math.nan,
        "max": float(known.max()) if len(known) else math.nan,
        "coverage": len(known) / len(x),
        "n_tokens": len(x),
    }


def staleness(rollouts: Rollouts, d: np.ndarray, known: np.ndarray, lag: np.ndarray) -> list[Finding]:
    """Missing and mixed versions, and drift at a declared lag of 0 that resets."""
    findings = []
    mask = rollouts.mask
    stamped = np.isfinite(lag[mask])
    if stamped.any() and not stamped.all():
        findings.append(
            Finding(
                "missing_version",
                "warning",
                "some tokens have no version: they are left out of the lag, never taken for lag 0",
                {"coverage": float(stamped.mean()), "n_tokens": int(mask.sum())},
            )
        )
    stamps = mask & np.isfinite(rollouts.version_rollout)
    version, row = rollouts.version_rollout[stamps], rollouts.row[stamps]
    change = (row[1:] == row[:-1]) & (version[1:] != version[:-1])
    if change.any():
        evidence = {"rows": len(np.unique(row[1:][change])), "of": rollouts.n}
        what = "responses were continued across a sync: read the lag token by token, the ratio of a response mixes them"
        findings.append(Finding("mixed_versions", "info", what, evidence))
    if not known.any():
        return findings
    step, square = step_means(rollouts, np.square(d), known)
    cycle = resets(square) if len(square) >= 6 else None
    if cycle is not None:
        findings.append(
            Finding(
                "hidden_staleness",
                "error",
                "at a declared lag of 0 the mismatch grows from step to step and falls back: the engine samples with"
                " older weights (or a stale prefix cache) than stamped; stamp a version when the engine has applied it,"
                " not when it was published, and reset its caches",
                {
                    "mean_square_by_step": square[:200].tolist(),
                    "resets_at_step": step[cycle].tolist(),
                    "unit": "nats^2",
                },
            )
        )
    return findings


def step_means(rollouts: Rollouts, x: np.ndarray, use: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Steps and the mean of x over the tokens of each."""
    per_token = np.repeat(judgement.steps_of(rollouts), np.diff(rollouts.starts))
    use = use & np.isfinite(per_token) & np.isfinite(x)
    steps, index = np.unique(per_token[use], return_inverse=True)
    n = np.bincount(index, minlength=len(steps))
    return steps, np.bincount(index, x[use], minlength=len(steps)) / np.maximum(n, 1)


def resets(square: np.ndarray) -> np.ndarray | None:
    """Indices where mean d^2 falls back after rising; None unless it does so twice, each rise to twice its start."""
    falls = np.flatnonzero(square[1:] < RESET * square[:-1]) + 1
    starts = np.concatenate([[0], falls[:-1]]) if len(falls) else falls
    good = [
        fall
        for start, fall in zip(starts, falls, strict=True)
        if fall - start >= 2 and square[fall - 1] > 2 * square[start] and np.mean(np.diff(square[start:fall]) > 0) > 0.6
    ]
    return np.array(good) if len(good) >= 2 else None


def constancy(rollouts: Rollouts, d: np.ndarray, use: np.ndarray) -> list[Finding]:
    """Is d the same everywhere? Against step, position, length, the sampler's log-prob; and is it a mixture."""
    findings = []
    square = np.where(use, d * d, 0.0)
    tokens = use.sum()
    lengths = np.add.reduceat(use.astype(np.int64), rollouts.starts[:-1])
    per_row = np.add.reduceat(square, rollouts.starts[:-1]) / np.maximum(lengths, 1)
    alive = lengths > 0
    position = np.arange(len(use)) - np.repeat(rollouts.starts[:-1], np.diff(rollouts.starts))
    profile = {}
    for name, x in (("step", rollouts.rows["step"]), ("length", lengths.astype(float))):
        ok = alive & np.isfinite(x)
        if ok.sum() >= 40 and np.ptp(x[ok]) > 0:
            correlation: Any = stats.spearmanr(x[ok], per_row[ok])
            low, high = np.quantile(x[ok], [0.25, 0.75])
            first, last = per_row[ok & (x <= low)].mean(), per_row[ok & (x >= high)].mean()
            if correlation.pvalue < 1e-6 and not 0.5 <= last / max(first, 1e-30) <= 2:
                profile[name] = {
                    "first_quarter": float(first),
                    "last_quarter": float(last),
                    "spearman": float(correlation.statistic),
                }
    if tokens >= 1000 and (longest := int(position[use].max())) >= 8:
        first, last = square[use & (position < longest / 4)], square[use & (position >= 3 * longest / 4)]
        if min(len(first), len(last)) >= 100:
            error = math.hypot(first.std() / math.sqrt(len(first)), last.std() / math.sqrt(len(last)))
            ratio = last.mean() / max(first.mean(), 1e-30)
            if abs(last.mean() - first.mean()) > 6 * error and not 0.5 <= ratio <= 2:
                profile["position"] = {"first_quarter": float(first.mean()), "last_quarter": float(last.mean())}
    if profile:
        findings.append(
            Finding(
                "discrepancy_not_constant",
                "warning",
                f"d^2 changes with {', '.join(profile)}: nothing that takes d for constant (one measured offset, one"
                " threshold for all steps) will hold; look at adapter merges, kernels by length, caches",
                profile | {"unit": "nats^2", "n_tokens": int(tokens)},
            )
        )
    x = np.abs(d[use])
    x = x[np.isfinite(x)]
    if len(x) >= 500:
        cut = np.partition(x, len(x) - len(x) // 20)[len(x) - len(x) // 20 :]
        share, median, rms = (
            float((cut**2).sum() / max((x**2).sum(), 1e-30)),
            float(np.median(x)),
            float(np.std(d[use])),
        )
        if share > 0.8 and rms > 4 * median and rms > 1e-3:
            findings.append(
                Finding(
                    "mixture_tail",
                    "warning",
                    "few tokens carry nearly all of the discrepancy (as where experts are routed differently):"
                    " subtracting a mean d would corrupt the clean ones; replay the routing, or mask the tail",
                    {
                        "top_5_percent_share": share,
                        "median_abs": median,
                        "rms": rms,
                        "n_tokens": len(x),
                        "unit": "nats",
                    },
                )
            )
    ratio_outside = float((np.abs(np.expm1(np.minimum(d[use], 50.0))) > CLIP).mean())
    if ratio_outside > 0.01:
        findings.append(
            Finding(
                "clip_budget",
                "warning",
                "the discrepancy alone puts tokens outside the clip band: the trust region is spent on numerics; anchor"
                " the clip at logp_old of the trainer and weight by the discrepancy apart",
                {"share_outside": ratio_outside, "band": [1 - CLIP, 1 + CLIP], "n_tokens": int(tokens)},
            )
        )
    return findings


DATA = ("placeholder", "observation_tokens", "ids_differ", "lengths_differ", "nonfinite", "positive_logprob",
        "negative_lag", "duplicate", "malformed", "mixed_schema", "unreadable")  # fmt: skip


def verdict(findings: list[Finding], outcome: dict[str, Any]) -> str:
    """One word: what to look at first."""
    errors = {f.code for f in findings if f.severity == "error"}
    if errors & {*semantics.SEMANTIC, *DATA}:
        return "semantics"
    if "hidden_staleness" in errors:
        return "hidden_staleness"
    if not outcome["identifiable"]:
        return "not_identifiable"
    if "prediction_failed" in errors:
        return "prediction_failed"
    if outcome["kl_sampler_train"]["k3"] < HEALTHY_K3 and outcome["ess"]["sequence"]["raw"] >= HEALTHY_ESS:
        return "healthy"
    return "lag" if outcome["lag_share"] >= 0.5 else "numerics"
