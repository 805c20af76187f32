"""Is it normal, which correction, when will it collapse: effective sample sizes, the run's own curve, public levels.

Everything is of RAW weights pi / q unless its name says otherwise; "sequence" is the product over a response's tokens.
"""

import math

import numpy as np

from sandbox.diagnosis.evidence import Evidence, Finding, Reference, k3
from sandbox.diagnosis.rollouts import MISSING
from sandbox.metrics import estimators
from sandbox.theory import collapse

HEALTHY_ESS, COLLAPSED_ESS = 0.9, 0.5
BOOTSTRAPPED = 2048  # responses; beyond, the delta method says the same
CAP = 2.0  # of the truncated ESS: TIS

# Public levels of k3 of KL(q || old) per token (reference list: miles blog of January 2026, R3 arXiv 2510.11370, MIS).
LEVELS = {"dense": (1e-5, 1e-3), "moe": (1e-3, 1e-1)}
GROUPS = ((1e-3, "low"), (2e-2, "middle"), (1e-1, "high"))
EXAMPLES = (
    ("dense, H20", 7e-4),
    ("Qwen3-8B", 6.4e-4),
    ("Qwen3-30B-A3B", 1.535e-3),
    ("dense, L20", 3e-3),
    ("dense, A100 with cascade attention", 7e-2),
)


def _interval(log_weight: np.ndarray, prompt: np.ndarray) -> tuple[float, float]:
    """90 % interval of the ESS, responses of one prompt as one cluster: bootstrap, or the delta method beyond 2,048."""
    n = len(log_weight)
    if n <= BOOTSTRAPPED:
        times = estimators.resamples(np.random.default_rng(0), n, prompt)
        return estimators.ess_interval(log_weight, times)
    value, influence = estimators.ess_and_influence(log_weight)
    sums = np.bincount(np.unique(prompt, return_inverse=True)[1], influence)
    error = float(value) * math.sqrt(float(np.sum(sums**2))) / n
    return max(float(value) - 1.645 * error, 1 / n), min(float(value) + 1.645 * error, 1.0)


def _size(raw: float, interval: tuple[float, float], log_weight: np.ndarray, n: int, unit: str, ratio: str) -> dict:
    """An ESS with what qualifies it; tails and the truncated ESS are read off `log_weight`, a sample of n."""
    limit = math.log(CAP)
    return {
        "raw": raw,
        "n": n,
        "interval": list(interval),
        "pareto_k": estimators.pareto_k(log_weight),
        "pareto_k_limit": estimators.pareto_k_limit(len(log_weight)),
        "chi2": 1 / raw - 1 if raw > 0 else math.nan,
        "truncated": float(estimators.ess(np.minimum(log_weight, limit))),
        "share_above_cap": float((log_weight > limit).mean()) if len(log_weight) else math.nan,
        "cap": CAP,
        "n_sampled": len(log_weight),
        "unit": unit,
        "ratio": ratio,
    }


def _ess(log_weight: np.ndarray, prompt: np.ndarray, ratio: str) -> dict:
    interval = _interval(log_weight, prompt) if len(log_weight) else (math.nan, math.nan)
    return _size(float(estimators.ess(log_weight)), interval, log_weight, len(log_weight), "sequence", ratio)


def ess(evidence: Evidence, resynced: bool) -> dict:
    """Sequence and token ESS of pi / q; with logp_sync of every token also the sequence's lag and discrepancy."""
    r = evidence.responses
    found = {"sequence": _ess(r["t"], r["prompt"], "pi/q"), "token": _token_ess(evidence)}
    if resynced and len(r["n"]) and (r["synced"] == r["n"]).all():
        found["sequence_lag"] = _ess(r["g"], r["prompt"], "pi/mu")
        found["sequence_discrepancy"] = _ess(r["d"], r["prompt"], "mu/q")
    if len(r["n"]):
        alive = np.isfinite(r["t"])
        mean = float(r["t"][alive].sum() / r["n"][alive].sum()) if alive.any() else 0.0
        found["sequence_after_mean"] = {
            "raw": float(estimators.ess(r["t"] - mean * r["n"])),
            "n": len(r["n"]),
            "unit": "sequence",
            "ratio": "pi/q, the mean log ratio per token subtracted",
            "mean_nats": mean,
        }
    return found


def _token_ess(evidence: Evidence) -> dict:
    r = evidence.responses
    n, first, second = (float(r[name].sum()) for name in ("n", "w", "ww"))
    raw = first**2 / second / n if second > 0 else math.nan
    if 0 < len(r["n"]) <= BOOTSTRAPPED and second > 0:
        times = estimators.resamples(np.random.default_rng(0), len(r["n"]), r["prompt"])
        interval = estimators.bootstrap_ess(times, r["n"], r["w"], r["ww"])
    elif second > 0:
        influence = 2 * r["w"] / first - r["ww"] / second - r["n"] / n
        error = raw * math.sqrt(float(np.sum(influence**2)))
        interval = (max(raw - 1.645 * error, 1 / n), min(raw + 1.645 * error, 1.0))
    else:
        interval = (math.nan, math.nan)
    return _size(raw, interval, evidence.sample.train - evidence.sample.rollout, int(n), "token", "pi/q")


def by_step(evidence: Evidence, resynced: bool) -> list[dict]:
    """A row a training step (null where the dump says none): what `ess` and `split` say of the whole, step by step."""
    r = evidence.responses
    if not len(r["n"]):
        return []
    order = np.argsort(r["step"], kind="stable")
    steps, starts = np.unique(r["step"][order], return_index=True)
    rows = []
    for step, here in zip(steps, np.split(order, starts[1:]), strict=True):
        part = {name: values[here] for name, values in r.items()}
        n, alive, m = part["n"].sum(), part["n"].sum() - part["zeros"].sum(), part["synced"].sum()
        raw = float(estimators.ess(part["t"]))
        low, high = _interval(part["t"], part["prompt"])
        reward = part["reward"][~np.isnan(part["reward"])]
        known = part["lag_known"].sum()
        split = resynced and m > 0
        rows.append(
            {
                "step": None if step < 0 else int(step),
                "n_responses": len(here),
                "n_tokens": int(n),
                "total": part["tt"].sum() / alive if alive else math.nan,
                "discrepancy": part["dd"].sum() / m if split else math.nan,
                "lag": part["gg"].sum() / m if split else math.nan,
                "kl_sampler_train_k3": part["k3"].sum() / alive if alive else math.nan,
                "ess_sequence": raw,
                "ess_sequence_interval": [low, high],
                "ess_sequence_pareto_k": estimators.pareto_k(part["t"]),
                "ess_sequence_lag": float(estimators.ess(part["g"])) if split and m == n else math.nan,
                "ess_token": part["w"].sum() ** 2 / part["ww"].sum() / n if part["ww"].sum() > 0 else math.nan,
                "mean_lag": part["lag_sum"].sum() / known if known else math.nan,
                "reward": float(reward.mean()) if len(reward) else math.nan,
                "reward_standard_error": float(reward.std(ddof=1) / math.sqrt(len(reward)))
                if len(reward) > 1
                else math.nan,
            }
        )
    return rows


def collapse_prediction(evidence: Evidence, resynced: bool) -> dict:
    """ess_step of the lag from the run's own Var[log w] against lag (THEORY section 6), and the period that avoids it.

    Var is -ln ESS of the responses whose tokens all have one lag k: of pi / mu with logp_sync, else of pi / q over its
    value at lag 0. Fitted only below ln 2 / 8, so that what it predicts is out of sample.
    """
    r = evidence.responses
    one = r["lag"] != MISSING
    split = resynced and len(one) > 0 and bool((r["synced"] == r["n"])[one].all())
    weight = r["g"] if split else r["t"]
    lags = np.unique(r["lag"][one]) if one.any() else np.zeros(0)
    curve, floor = [], 0.0
    for lag in lags:
        here = weight[r["lag"] == lag]
        if len(here) < 8:
            continue
        value = float(estimators.ess(here))
        variance = -math.log(value) if value > 0 else math.nan
        if lag == 0 and not split:
            floor = variance
        curve.append({"k": int(lag), "var_log_ratio": variance, "ess": value, "n": len(here)})
    at_zero = any(row["k"] == 0 for row in curve)
    identified = split or at_zero
    for row in curve:
        row["var_log_ratio"] = max(row["var_log_ratio"] - floor, 0.0) if identified else math.nan
    curve = [row for row in curve if row["k"] >= 1]
    k = np.array([row["k"] for row in curve], float)
    fit = collapse.fit_collapse(k, np.array([row["var_log_ratio"] for row in curve]), curvature=True)
    for row, value in zip(curve, fit.curve(k), strict=True):
        row["fit"] = float(value)
    below = [row["k"] for row in curve if identified and row["var_log_ratio"] >= math.log(1 / COLLAPSED_ESS)]
    why = "fitted" if fit.points_used >= collapse.FIT_POINTS else "fewer than 3 lags with Var below ln 2 / 8"
    if not identified:
        why = "neither logp_sync nor responses of lag 0"
    elif not curve:
        why = "no responses of lag 1 or more, or without a known lag"
    return {
        "ess_step": fit.ess_step,
        "interval": list(fit.interval),
        "status": fit.status,
        "why": why,
        "unit": "optimiser updates since the sync until the sequence ESS of the lag is below 1/2",
        "sync_period": max(fit.ess_step - 1, 1) if math.isfinite(fit.ess_step) else math.nan,
        "observed_ess_step": min(below) if below else math.nan,
        "largest_lag_seen": int(lags.max()) if len(lags) else None,
        "a": fit.a,
        "b": fit.b,
        "gamma": fit.gamma,
        "points_used": fit.points_used,
        "of": "pi/mu" if split else "pi/q above its value at lag 0",
        "curve": curve,
    }


def reference_levels(ref: Reference) -> dict:
    """Where k3 of the discrepancy lies among publicly reported levels, per token."""
    value = float(k3(ref.d).mean()) if len(ref.d) else math.nan
    places = {name: _place(value, low, high) for name, (low, high) in LEVELS.items()}
    group = next((name for limit, name in GROUPS if value <= limit), "beyond all reported")
    nearest = min(EXAMPLES, key=lambda e: abs(math.log(e[1] / value)))[0] if value > 0 else None
    return {
        "k3": value,
        "unit": "nats per token, KL(q || trainer at the sampler's weights)",
        "basis": ref.basis if ref.basis != "logp_train" else "logp_train: holds the lag too, so an upper bound",
        "n_tokens": len(ref.d),
        "group": group if not math.isnan(value) else None,
        "nearest": nearest,
        "levels": {name: list(limits) for name, limits in LEVELS.items()},
        **places,
    }


def _place(value: float, low: float, high: float) -> str | None:
    if math.isnan(value):
        return None
    return "below" if value < low else "above" if value > high else "within"


def alarms(evidence: Evidence, sizes: dict) -> list[Finding]:
    """heavy_tail, small_sample, ess_collapse, per_rank_ess."""
    found, sequence = [], sizes["sequence"]
    n, raw, k = sequence["n"], sequence["raw"], sequence["pareto_k"]
    if k > sequence["pareto_k_limit"]:
        message = f"Pareto k of the sequence weights is {k:.2f}, limit {sequence['pareto_k_limit']:.2f} at n = {n}: the"
        message += " true ESS is lower, and means of weights cannot be trusted"
        found.append(Finding("heavy_tail", "warning", message, {"pareto_k": k, "n": n, "unit": "sequence"}))
    if n < 256:
        message = f"{n} responses: a sample ESS flatters, the more so the fewer there are; use 1,024 or more"
        found.append(Finding("small_sample", "info" if n >= 64 else "warning", message, {"n": n, "unit": "sequence"}))
    if raw < COLLAPSED_ESS:
        message = f"the raw sequence ESS is {raw:.3g} of n = {n}, below 1/2: sync more often if the cause is lag, align"
        message += " the engines if it is numerics"
        numbers = {"ess": raw, "interval": sequence["interval"], "n": n, "stage": "raw", "ratio": "pi/q"}
        found.append(Finding("ess_collapse", "warning", message, numbers))
    ranks = evidence.responses["rank"]
    if len(ranks) and not np.isnan(ranks).any() and len(names := np.unique(ranks)) > 1:
        t = evidence.responses["t"]
        mean = float(np.mean([float(estimators.ess(t[ranks == name])) for name in names]))
        if abs(mean - raw) > 0.02 * raw:
            message = f"the mean of the {len(names)} ranks' ESS is {mean:.3g}, that of all responses is {raw:.3g}:"
            message += " gather the log weights, do not average ranks"
            numbers = {"mean_of_ranks": mean, "global": raw, "n_ranks": len(names), "n": n, "unit": "sequence"}
            found.append(Finding("per_rank_ess", "info", message, numbers))
    return found


def prediction_failed(steps: list[dict]) -> Finding | None:
    """The reward fell for good although the sequence ESS had stayed above 1/2: the ESS did not warn."""
    rows = [row for row in steps if row["step"] is not None and not math.isnan(row["reward"])]
    if len(rows) < 6:
        return None
    reward = np.array([row["reward"] for row in rows])
    error = np.nan_to_num(np.array([row["reward_standard_error"] for row in rows]))
    window = max(2, min(5, len(rows) // 4))
    smooth = np.convolve(reward, np.ones(window) / window, mode="valid")
    noise = np.sqrt(np.convolve(error**2, np.ones(window), mode="valid")) / window
    top, last = int(np.argmax(smooth[: len(smooth) - window + 1])), len(smooth) - 1
    drop = float(smooth[top] - smooth[last])
    if last - top < window or drop < 4 * math.hypot(noise[top], noise[last]):
        return None
    if drop < 0.3 * abs(smooth[top]) or drop < 0.5 * (smooth[top] - smooth.min()):
        return None
    middle = smooth[top] - drop / 2
    fell = next(i for i in range(top, len(rows)) if (reward[i : i + window] < middle).all())
    ess_before = min(row["ess_sequence"] for row in rows[: fell + 1])
    if ess_before < COLLAPSED_ESS:
        return None
    numbers = {
        "reward_before": float(smooth[top]),
        "reward_after": float(smooth[last]),
        "standard_error": math.hypot(noise[top], noise[last]),
        "fell_at_step": rows[fell]["step"],
        "lowest_ess_sequence_until_then": ess_before,
        "lowest_ess_token_until_then": min(row["ess_token"] for row in rows[: fell + 1]),
        "n_steps": len(rows),
    }
    message = f"the reward fell from {smooth[top]:.3g} to {smooth[last]:.3g} around step {rows[fell]['step']}, but the"
    message += f" sequence ESS stayed above {ess_before:.3g}: the ESS did not predict this collapse. Look at what a"
    message += " ratio does not see: the reward, entropy, the learning rate, the clip, the KL to the reference"
    return Finding("prediction_failed", "error", message, numbers)
