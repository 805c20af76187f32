"""The experiments behind C1 to C4 and C10 (THEORY section 8): what the two sources are, and what each does.

Each takes the claim's threshold and `fast`, and returns an `Outcome`; `claims.py` states the criteria. Tabular, without
sampling noise but for the drawn trainings of C2 and C10, whose numbers do not depend on it.
"""

import math
from dataclasses import replace
from fractions import Fraction

import numpy as np
import polars as pl

from sandbox.corrections import CORRECTIONS, EveryK
from sandbox.experiments.verdicts import Outcome, judge, setting
from sandbox.tabular import bias, exact, simulate
from sandbox.tabular.policy import ConstantOffset, log_policy, policies, policies_of
from sandbox.tabular.problems import PRESETS, Case
from sandbox.tabular.simulate import SimConfig
from sandbox.theory import lag


def token_error_splits(threshold: float, fast: bool, seed: int = 0) -> Outcome:
    """C1. In rational arithmetic on the very floats, so that rounding of the differences says nothing."""
    train_, sync, rollout = (p.ravel().tolist() for p in policies_of(PRESETS["machine"](seed)))
    gap = [
        abs((Fraction(pi) - Fraction(mu)) + (Fraction(mu) - Fraction(q)) - (Fraction(pi) - Fraction(q)))
        for pi, mu, q in zip(train_, sync, rollout, strict=True)
    ]
    return Outcome(float(max(gap)), "by construction", "t = d + g whatever the three policies are", len(gap))


def discrepancy_is_constant(threshold: float, fast: bool, seed: int = 0) -> Outcome:
    """C2. One run under token TIS: d and g of every token before each update, root mean squares over the table."""
    problem, base = setting("machine", seed)
    period = 10
    cfg = replace(base, correction=CORRECTIONS["tis"], discrepancy=ConstantOffset(0.05), resync=EveryK(period))
    rngs = simulate.generators(seed, range(1))
    state, rows, moved, last = simulate.init(rngs, problem, np.zeros(problem.shape), cfg), [], 0.0, None
    for step in range(30 if fast else 100):
        pi, mu, q = (p[0] for p in state.policies)
        d, g = mu - q, pi - mu
        if last is not None and state.since_sync[0] > 0:
            moved = max(moved, float(np.abs(d - last).max()))
        last = d.copy()
        rows.append({"step": step, "d": math.sqrt((d**2).mean()), "g": math.sqrt((g**2).mean())})
        state, _ = simulate.step(rngs, problem, state, cfg)
    table = pl.DataFrame(rows)
    measured = {
        "rms d, least": table["d"].min(),
        "rms d, most": table["d"].max(),
        "rms g after a sync": table["g"][period],
        "rms g before a sync": table["g"].gather_every(period, period - 1).mean(),
    }
    reason = (
        "between syncs neither mu nor q moves, and the offset is constant; across syncs only d's constant per state"
    )
    return Outcome(moved, "by construction", reason, len(table), measured=measured, table=table)


def discrepancy_bias(threshold: float, fast: bool, seed: int = 0) -> Outcome:
    """C3. Mean-field on-policy training under an offset; the bias of each update, the four parts against T."""
    case = PRESETS["machine"](seed)
    problem, offset = case.problem, 0.05 * np.random.default_rng(seed).normal(size=case.problem.shape)
    logits, first, cosine, size = np.zeros(problem.shape), None, [], []
    for _ in range(200):
        now = policies(logits, logits, offset)
        update, gradient = (
            exact.expected_update(problem, now, CORRECTIONS[c], "normalised") for c in ("none", "seq_is")
        )
        off = update - gradient
        first = off if first is None else first
        cosine.append(float((off * first).sum() / np.linalg.norm(off) / np.linalg.norm(first)))
        size.append(float(np.linalg.norm(off) / np.linalg.norm(first)))
        logits = logits + setting("machine", seed).cfg.step_size * update
    later = cosine[-1]
    cosine, size = cosine[:20], size[:20]
    # What centring leaves of a tiny d, against the last three parts
    small, logp = 1e-5, log_policy(case.sampler_logits)
    now = policies(case.sampler_logits, case.sampler_logits, small * case.sampler_log_offset)
    left = exact.expected_update(problem, now, CORRECTIONS["dlc"]) - exact.gradient(problem, logp)
    parts = bias.split(problem, logp, -small * case.sampler_log_offset)
    rest = parts.left(bias.DISCREPANCY_LEFT["dlc"])
    error = float(np.linalg.norm(left - rest) / np.linalg.norm(rest))
    table = bias.by_horizon(problem, logp, -case.sampler_log_offset, [1, 8, 64] if fast else [1, 4, 16, 64, 256, 1024])
    at = table.filter(pl.col("horizon") == 64).row(0, named=True)
    measured = {
        "cosine of the bias with the first, least of 20 updates": min(cosine),
        "the same cosine after 200 updates": later,
        "size of the bias over the first, least": min(size),
        "size of the bias over the first, most": max(size),
        "four parts hold to": error,
        **{f"{part} over total at T = 64": at[part] / at["total"] for part in bias.PARTS},
        "left by centring over total at T = 64": at["left_by_dlc"] / at["total"],
    }
    nearly_fixed = min(cosine) >= threshold and min(size) >= 0.5 and max(size) <= 2
    removed = error <= 1e-3
    reason = f"nearly fixed: {'yes' if nearly_fixed else 'no'}; leading part removed: {'yes' if removed else 'no'}"
    return Outcome(min(cosine), judge(nearly_fixed and removed), reason, 20, measured=measured, table=table)


def lag_closes_a_loop(threshold: float, fast: bool, seed: int = 0) -> Outcome:
    """C4. Mean-field, frozen exact sampler, up to the last update with ESS >= 1/2: uncorrected against exactly
    corrected, and against the loop with its bias linearised. The lag is that of the whole table, and on
    negative_prefixes that of the lost state, which the exact gradient leaves as it starts."""
    worst, agree, measured, frames = 0.0, [], {}, []
    for name, (eta, states) in LOOP_CASES.items():
        table = _loop_table(PRESETS[name](seed), eta, states)
        excess = ((table["lag_none"] - table["lag_exact"]) / table["lag_exact"])[-1]
        predicted = ((table["predicted"] - table["lag_exact"]) / table["lag_exact"])[-1]
        agree.append(excess * predicted > 0)
        worst = max(worst, abs(excess - predicted) / abs(excess))
        measured |= {f"{name}: excess lag over the exactly corrected": excess, f"{name}: predicted": predicted}
        measured |= {f"{name}: updates": len(table)}
        frames.append(table.with_columns(preset=pl.lit(name)))
    signs = {np.sign(measured[f"{name}: excess lag over the exactly corrected"]) for name in LOOP_CASES}
    exponents = _growth_exponents(seed)
    measured |= {"exponent of discrepancy's excess in k": exponents[0], "exponent of lag's excess in k": exponents[1]}
    open_loop = abs(exponents[0] - 1) <= 0.2 and exponents[1] >= 1.8
    holds = all(agree) and len(signs) == 2 and worst <= threshold and open_loop
    reason = (
        f"sign as predicted: {sum(agree)} of {len(agree)}; both signs occur: {'yes' if len(signs) == 2 else 'no'};"
        f" discrepancy linear and lag faster: {'yes' if open_loop else 'no'}"
    )
    return Outcome(worst, judge(holds), reason, len(agree), measured=measured, table=pl.concat(frames))


# step size, which leaves 10 updates or more with ESS >= 1/2, and the states whose lag is measured
LOOP_CASES = {"negative_prefixes": (0.01, [2]), "machine": (0.03, slice(None)), "sparse_tree": (0.5, slice(None))}


def _loop_table(case: Case, eta: float, states: slice | list[int]) -> pl.DataFrame:
    """Lag after k = 1 .. updates of the uncorrected run, the exactly corrected one and the linear loop, from the lag
    that negative_prefixes starts with, and from none elsewhere: columns k, lag_none, lag_exact, predicted."""
    problem, sampler, rows = case.problem, case.sampler_logits, []
    logp = log_policy(sampler)
    scale = exact.advantage_scale(problem, logp, "normalised")
    none = weighted = linear = case.logits - sampler if isinstance(states, list) else np.zeros(problem.shape)
    for k in range(1, 61):
        now = policies(sampler + none, sampler)
        none = none + eta * exact.expected_update(problem, now, CORRECTIONS["none"], "normalised")
        weighted = weighted + eta * exact.gradient(problem, log_policy(sampler + weighted)) / scale
        true = exact.gradient(problem, log_policy(sampler + linear)) / scale
        linear = linear + eta * (true - lag.left_out(problem, logp, linear))
        if exact.ess(problem, log_policy(sampler + none), logp) < 0.5:
            break
        size = (float(np.linalg.norm(x[states])) for x in (none, weighted, linear))
        rows.append((k, *size))
    return pl.DataFrame(rows, schema=["k", "lag_none", "lag_exact", "predicted"], orient="row")


def _growth_exponents(seed: int) -> tuple[float, float]:
    """d log |x_k - x_k(exact)| / d log k over k = 2 .. 12, small steps: an offset without lag; a lag without offset."""
    case = PRESETS["machine"](seed)
    problem, eta, steps, shape = case.problem, 0.005, 12, (12, -1)

    def synced(offset: np.ndarray | float) -> np.ndarray:
        x = [np.zeros(problem.shape)]
        for _ in range(steps):
            now = policies(case.logits + x[-1], case.logits + x[-1], offset)
            x.append(x[-1] + eta * exact.expected_update(problem, now, CORRECTIONS["none"], "normalised"))
        return np.array(x[1:])

    true, stale = (
        lag.path(problem, case.logits, SimConfig(CORRECTIONS[c], step_size=eta, steps=steps))[1:]
        for c in ("seq_is", "none")
    )
    k = np.log(np.arange(2, steps + 1))
    # the exactly corrected path divides by the sampler's frozen scale, the synced ones by their own
    gaps = synced(case.sampler_log_offset) - synced(0.0), stale - true
    slopes = [np.polyfit(k, np.log(np.linalg.norm(gap.reshape(shape), axis=1)[1:]), 1)[0] for gap in gaps]
    return float(slopes[0]), float(slopes[1])


def exact_sampler_has_no_kl(threshold: float, fast: bool, seed: int = 0) -> Outcome:
    """C10. On-policy training with an exact sampler: largest |log pi - log q| of any token before any update."""
    problem, base = setting("machine", seed)
    cfg, rngs = replace(base, resync=EveryK(1)), simulate.generators(seed, range(2))
    state, most, steps = simulate.init(rngs, problem, np.zeros(problem.shape), cfg), 0.0, 20 if fast else 100
    for _ in range(steps):
        most = max(most, float(np.abs(state.policies.train - state.policies.rollout).max()))
        state, _ = simulate.step(rngs, problem, state, cfg)
    return Outcome(most, "by construction", "without an offset q is computed by the code that computes mu", steps)
