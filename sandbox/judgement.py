"""Judgement of a dump: ESS by step with its uncertainty, the predicted collapse, corrections ranked on its own ratios.

Log ratios are trainer minus sampler, in nats; weights are raw unless a name says otherwise.
"""

import math
from typing import Any

import numpy as np

from sandbox import collapse, diagnostics, ratios
from sandbox.batch import Batch
from sandbox.corrections import CORRECTIONS
from sandbox.rollouts import Rollouts
from sandbox.semantics import Finding

FEW = 100  # responses below which an ESS is said to be of a small sample
TOKENS = 200_000  # tokens that an interval or a tail is read from at most

# Published levels of mean k3 of KL(sampler || trainer) per token, nats, low and high end.
LEVELS = {"dense": (1e-5, 1e-3), "mixture of experts": (1e-3, 1e-1)}


def sequence(rollouts: Rollouts, x: np.ndarray) -> np.ndarray:
    """Sum of x over the tokens of each response: a log weight. (N,) -> (n,)"""
    return np.add.reduceat(x, rollouts.starts[:-1])


def ess_of(log_weight: np.ndarray, group: np.ndarray | None = None, unit: str = "sequence") -> dict[str, Any]:
    """Raw ESS as a fraction of n, its bootstrap interval (5 to 95 %, prompts whole), Pareto k of the weights."""
    n = len(log_weight)
    some = log_weight
    if n > TOKENS:
        some, group = np.random.default_rng(0).choice(log_weight, TOKENS, replace=False), None
    tokens = unit == "token"
    times = (
        None if tokens and len(some) > 5000 else diagnostics.resamples(np.random.default_rng(0), len(some), group, 200)
    )
    if times is None:  # so many independent weights: the normal interval is as good
        value, influence = diagnostics.ess_and_influence(some)
        half = 1.645 * float(value) * float(np.sqrt(np.square(influence).sum())) / len(some)
        interval = (float(value) - half, min(float(value) + half, 1.0))
    else:
        interval = diagnostics.ess_interval(some, times)
    return {
        "raw": float(diagnostics.ess(log_weight)),
        "n": n,
        "interval": list(interval),
        "pareto_k": diagnostics.pareto_k(some),
        "unit": unit,
        "stage": "raw",
    }


def both_ess(rollouts: Rollouts, t: np.ndarray) -> dict[str, Any]:
    """ESS of the total ratio, sequence and token."""
    whole = ess_of(sequence(rollouts, t), rollouts.group)
    return {"sequence": whole, "token": ess_of(t[rollouts.mask], unit="token")}


def steps_of(rollouts: Rollouts) -> np.ndarray:
    step = rollouts.rows["step"]
    return np.where(np.isnan(step), rollouts.rows["version_train"], step)


def by_step(rollouts: Rollouts, t, d, g, known) -> list[dict[str, Any]]:
    """A row a training step: n, ESS with interval and Pareto k, KL, mean squares of d and g, reward."""
    step = steps_of(rollouts)
    lengths = np.add.reduceat(rollouts.mask.astype(np.int64), rollouts.starts[:-1])
    log_weight = sequence(rollouts, t)
    with np.errstate(over="ignore", invalid="ignore"):
        sums = {
            "kl_sampler_train_k3": sequence(rollouts, np.where(rollouts.mask, ratios.ESTIMATORS["k3"](t), 0.0)),
            "discrepancy": sequence(rollouts, d * d),
            "lag": sequence(rollouts, g * g),
        }
    counted = {name: lengths for name in sums}
    counted["discrepancy"] = counted["lag"] = np.add.reduceat(
        (known & rollouts.mask).astype(np.int64), rollouts.starts[:-1]
    )
    reward = rollouts.rows["reward"]
    table = []
    for value in np.unique(step[np.isfinite(step)]):
        here = step == value
        ess = ess_of(log_weight[here], rollouts.group[here])
        means = {name: float(x[here].sum() / max(counted[name][here].sum(), 1)) for name, x in sums.items()}
        rewards = reward[here][np.isfinite(reward[here])]
        table.append(
            {
                "step": value,
                "n_responses": int(here.sum()),
                "n_tokens": int(lengths[here].sum()),
                "ess": ess["raw"],
                "ess_interval": ess["interval"],
                "pareto_k": ess["pareto_k"],
                **means,
                "reward": float(rewards.mean()) if len(rewards) else math.nan,
                "reward_error": float(rewards.std() / math.sqrt(len(rewards))) if len(rewards) else math.nan,
            }
        )
    return table


def prediction_failed(steps: list[dict[str, Any]]) -> Finding | None:
    """ESS stayed high and the reward collapsed all the same."""
    if len(steps) < 6:
        return None
    reward = np.array([row["reward"] for row in steps])
    error = np.array([row["reward_error"] for row in steps])
    third = len(steps) // 3
    if not np.isfinite(reward).all() or min(row["ess"] for row in steps) < 0.8:
        return None
    best = max(reward[i : i + third].mean() for i in range(len(steps) - 2 * third + 1))
    last = reward[-third:].mean()
    noise = math.sqrt(2 * float(np.square(error).mean()) / third)
    if best - last < 5 * noise + 1e-12 or best - last < 0.5 * (best - min(reward.min(), 0.0)):
        return None
    return Finding(
        "prediction_failed",
        "error",
        "the reward collapsed while the ESS stayed high: the mismatch did not announce it; look elsewhere (step size,"
        " reward, entropy) before any correction",
        {"lowest_ess": min(row["ess"] for row in steps), "best_reward": best, "last_reward": last, "steps": len(steps)},
    )


def warnings(rollouts: Rollouts, t: np.ndarray, d: np.ndarray, known: np.ndarray) -> list[Finding]:
    """Small sample, heavy tail, collapsed ESS, ESS averaged over ranks."""
    findings = []
    log_weight = sequence(rollouts, t)
    n = len(log_weight)
    ess, k = float(diagnostics.ess(log_weight)), diagnostics.pareto_k(log_weight)
    if n < FEW:
        what = f"{n} responses: a sample ESS flatters, and cannot fall below 1/n"
        findings.append(Finding("small_sample", "info", what, {"n": n}))
    if k > diagnostics.pareto_k_limit(n):
        what = "the largest sequence weights have too heavy a tail: the ESS is an upper bound at best"
        findings.append(
            Finding("heavy_tail", "warning", what, {"pareto_k": k, "limit": diagnostics.pareto_k_limit(n), "n": n})
        )
    if ess < 0.5:
        what = "the raw sequence ESS is below 1/2: sync more often, or shorten what one weight multiplies"
        findings.append(
            Finding("ess_collapse", "warning", what, {"ess": ess, "n": n, "unit": "sequence", "stage": "raw"})
        )
    rank = rollouts.rows["rank"]
    ranks = np.unique(rank[np.isfinite(rank)])
    if len(ranks) > 1:
        parts = [float(diagnostics.ess(log_weight[rank == r])) for r in ranks]
        if abs(np.mean(parts) - ess) > 0.05:
            what = "the mean of per-rank ESS is not the ESS of the batch: reduce sums over ranks, not fractions"
            findings.append(
                Finding("per_rank_ess", "warning", what, {"mean_of_ranks": float(np.mean(parts)), "global": ess})
            )
    return findings


def collapse_prediction(rollouts: Rollouts, g: np.ndarray, known: np.ndarray, lag: np.ndarray) -> dict[str, Any]:
    """Var of the sequence log lag ratio against the lag, fitted and extrapolated to ESS 1/2; the sync period for it."""
    first = lag[rollouts.starts[:-1]]
    whole = np.logical_and.reduceat(known | ~rollouts.mask, rollouts.starts[:-1])
    x = sequence(rollouts, g)
    points = []
    for value in np.unique(first[np.isfinite(first) & (first >= 1)]):
        here = whole & (first == value) & np.isfinite(x)
        if here.sum() >= 8:
            points.append((float(value), float(x[here].var()), int(here.sum())))
    k, var = np.array([p[0] for p in points]), np.array([p[1] for p in points])
    fit = collapse.fit_collapse(k, var) if len(points) else None
    step = math.nan if fit is None else fit.ess_step
    return {
        "status": "not_identifiable" if fit is None else fit.status,
        "ess_step": step,
        "interval": [math.nan, math.nan] if fit is None else list(fit.interval),
        "sync_period": max(math.ceil(step) - 1, 1) if math.isfinite(step) else step,
        "unit": "optimiser updates since the sync",
        "points": [{"lag": a, "var_log_ratio": b, "n_responses": n} for a, b, n in points],
    }


def reference_level(k3: float) -> dict[str, Any]:
    """Where mean k3 lies among published levels."""
    where = {name: "below" if k3 < low else "above" if k3 > high else "within" for name, (low, high) in LEVELS.items()}
    return {
        "k3": k3,
        "unit": "nats a token, KL(sampler || trainer)",
        "levels": {n: list(v) for n, v in LEVELS.items()},
    } | {"position": where}


def ranked(rollouts: Rollouts, t: np.ndarray, most: int = 2000) -> list[dict[str, Any]]:
    """Corrections on this dump's ratios, best first by bias^2 + variance.

    Against the exact sequence weight W (mean 1), for a response of unit advantage: `bias` bounds |E[(w - W) f]| for any
    f of unit variance by sd(w - W); `variance` is that of w over n. w is the correction's weight, averaged over the
    response's tokens where it has one a token.
    """
    s = sequence(rollouts, t)
    pick = np.flatnonzero(np.isfinite(s))
    if len(pick) < 2:
        return []
    if len(pick) > most:
        pick = np.sort(np.random.default_rng(0).choice(pick, most, replace=False))
    log_w = s[pick] - s[pick].max()
    exact = np.exp(log_w) / np.exp(log_w).mean()
    response = np.full(rollouts.n, -1)
    response[pick] = np.arange(len(pick))
    owner = response[rollouts.row]
    use = rollouts.mask & (owner >= 0)
    tokens, owner = t[use], owner[use]
    count = np.bincount(owner, minlength=len(pick))

    def by_token(rule: str) -> np.ndarray:
        return np.bincount(owner, weights_of(rule, tokens), minlength=len(pick)) / count

    weights = {
        "none": np.ones(len(pick)),
        "token TIS, cap 2": by_token("tis"),
        "IcePop [0.5, 5]": by_token("icepop"),
        "sequence TIS, cap 2": weights_of("seq_tis", s[pick]),
        "sequence MIS, cap 2": weights_of("seq_mis", s[pick]),
        "sequence IS": exact,
    }
    table = []
    for name, w in weights.items():
        bias, variance = float(np.std(w - exact)), float(np.var(w) / len(s))
        table.append({"correction": name, "bias": bias, "variance": variance, "squared_error": bias**2 + variance})
    return sorted(table, key=lambda row: row["squared_error"])


def weights_of(rule: str, log_ratio: np.ndarray) -> np.ndarray:
    """What a preset makes of each total log ratio, 0 where rejected, each a response of one token. (n,) -> (n,)"""
    ones = np.ones((len(log_ratio), 1))
    weight, keep, _ = CORRECTIONS[rule](Batch(log_ratio[:, None], 0 * ones, ones > 0, ones))
    return np.where(keep, weight, 0.0)[:, 0]


def advice(outcome: dict[str, Any]) -> list[str]:
    """What to do, the most urgent first."""
    said = [f["message"] for f in outcome["findings"] if f["severity"] == "error"]
    period, word = outcome["collapse_prediction"]["sync_period"], outcome["verdict"]
    if word == "healthy":
        said.append("nothing to repair; keep measuring the raw sequence ESS")
    if word == "not_identifiable":
        said.append("record the trainer's log-probs at the sampler's weights (logp_sync), or keep some rows of lag 0")
    if word == "lag":
        said.append("most of the error is lag: sync more often before choosing a correction")
    if word == "numerics":
        said.append(
            "most of the error is numerics: repair the engines (float32 head, kernels, routing) before a correction"
        )
    if isinstance(period, int):
        said.append(f"sync at least every {period} updates to hold the sequence ESS of the lag above 1/2")
    if word in ("lag", "numerics") and outcome["corrections"]:
        said.append(f"on this dump's ratios the smallest error is that of: {outcome['corrections'][0]['correction']}")
    return said
