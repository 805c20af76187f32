"""The experiments behind C1 to C11 (THEORY section 8) on tabular policies; `claims.py` states their criteria.

Each takes the claim's threshold and `fast`, and returns an `Outcome`. Seeds are fixed. "On-policy" is an exact sampler
that syncs after every update. Returns are read exactly, so the noise is that of training.
"""

import math
from dataclasses import dataclass, replace
from fractions import Fraction

import numpy as np
import polars as pl

from sandbox import bias, exact, lag, ratios, simulate, theory
from sandbox.arrays import detach, masked, namespace
from sandbox.batch import Batch
from sandbox.corrections import CIS, CORRECTIONS, Corrected, Correction
from sandbox.mismatch import ConstantOffset, EssBelow, EveryK, Never
from sandbox.policy import log_policy, policies, policies_of
from sandbox.problems import PRESETS, Case
from sandbox.verdicts import Outcome, bootstrap, difference, failure_steps, judge, setting, train, updates

SETTINGS = ("penalised", "machine", "tree")
ON_POLICY_FIRST = 1000  # first run number of on-policy trainings: never the seeds of the runs beside them
HEALTHY_KL = 0.01  # nats per token on the sampler's prefixes, which no dashboard calls alarming


def token_error_splits(threshold: float, fast: bool) -> Outcome:
    """C1. In rational arithmetic on the very floats, so that rounding of the differences says nothing."""
    train_, sync, rollout = (p.ravel().tolist() for p in policies_of(PRESETS["machine"]()))
    gap = [
        abs((Fraction(pi) - Fraction(mu)) + (Fraction(mu) - Fraction(q)) - (Fraction(pi) - Fraction(q)))
        for pi, mu, q in zip(train_, sync, rollout, strict=True)
    ]
    return Outcome(float(max(gap)), "by construction", "t = d + g whatever the three policies are", len(gap))


def discrepancy_is_constant(threshold: float, fast: bool) -> Outcome:
    """C2. One run under token TIS: d and g of every token before each update, root mean squares over the table."""
    problem, base = setting("machine")
    period = 10
    cfg = replace(base, correction=CORRECTIONS["tis"], discrepancy=ConstantOffset(0.05), resync=EveryK(period))
    rngs = simulate.generators(0, range(1))
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


def discrepancy_bias(threshold: float, fast: bool) -> Outcome:
    """C3. Mean-field on-policy training under an offset; the bias of each update, the four parts against T."""
    case = PRESETS["machine"]()
    problem, offset = case.problem, 0.05 * np.random.default_rng(0).normal(size=case.problem.shape)
    logits, first, cosine, size, none = np.zeros(problem.shape), None, [], [], CORRECTIONS["none"]
    for _ in range(200):
        now = policies(logits, logits, offset)
        update, gradient = (
            exact.expected_update(problem, now, CORRECTIONS[c], "normalised") for c in ("none", "seq_is")
        )
        off = update - gradient
        first = off if first is None else first
        cosine.append(float((off * first).sum() / np.linalg.norm(off) / np.linalg.norm(first)))
        size.append(float(np.linalg.norm(off) / np.linalg.norm(first)))
        logits = logits + setting("machine").cfg.step_size * update
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


def lag_closes_a_loop(threshold: float, fast: bool) -> Outcome:
    """C4. Mean-field, frozen exact sampler, up to the last update with ESS >= 1/2: uncorrected against exactly
    corrected, and against the loop with its bias linearised. The lag is that of the whole table, and on
    negative_prefixes that of the lost state, which the exact gradient leaves as it starts."""
    worst, agree, measured, frames = 0.0, [], {}, []
    for name, (eta, states) in LOOP_CASES.items():
        table = _loop_table(PRESETS[name](), eta, states)
        excess = ((table["lag_none"] - table["lag_exact"]) / table["lag_exact"])[-1]
        predicted = ((table["predicted"] - table["lag_exact"]) / table["lag_exact"])[-1]
        agree.append(excess * predicted > 0)
        worst = max(worst, abs(excess - predicted) / abs(excess))
        measured |= {f"{name}: excess lag over the exactly corrected": excess, f"{name}: predicted": predicted}
        measured |= {f"{name}: updates": len(table)}
        frames.append(table.with_columns(preset=pl.lit(name)))
    signs = {np.sign(measured[f"{name}: excess lag over the exactly corrected"]) for name in LOOP_CASES}
    exponents = _growth_exponents()
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


def _growth_exponents() -> tuple[float, float]:
    """d log |x_k - x_k(exact)| / d log k over k = 2 .. 12, small steps: an offset without lag; a lag without offset."""
    case = PRESETS["machine"]()
    problem, eta, steps, shape = case.problem, 0.005, 12, (12, -1)
    x, synced = np.zeros(problem.shape), []
    for _ in range(steps):
        now = policies(case.logits + x, case.logits + x, case.sampler_log_offset)
        x = x + eta * exact.expected_update(problem, now, CORRECTIONS["none"], "normalised")
        synced.append(x)
    true, stale = (lag.path(problem, case.logits, CORRECTIONS[c], eta, steps)[1:] for c in ("seq_is", "none"))
    # The exactly corrected path divides by the sampler's frozen scale; the synced one by its own.
    fresh, y = [], np.zeros(problem.shape)
    for _ in range(steps):
        y = y + eta * exact.expected_update(
            problem, policies(case.logits + y, case.logits + y), CORRECTIONS["none"], "normalised"
        )
        fresh.append(y)
    k = np.log(np.arange(2, steps + 1))
    gaps = np.array(synced) - np.array(fresh), stale - true
    slopes = [np.polyfit(k, np.log(np.linalg.norm(gap.reshape(shape), axis=1)[1:]), 1)[0] for gap in gaps]
    return float(slopes[0]), float(slopes[1])


def weighting_fails_at_half(threshold: float, fast: bool) -> Outcome:
    """C5. Untruncated sequence weights, exact sampler never synced; failure_step over ess_step of each run."""
    runs, measured, ratios_, early = (6 if fast else 24), {}, [], []
    for name in ("machine", "tree"):
        base = replace(setting(name).cfg, steps=updates(name, fast))
        on = train(name, replace(base, resync=EveryK(1)), runs, ON_POLICY_FIRST)
        fresh = train(name, replace(base, resync=EveryK(1)), runs)
        weighted = train(name, replace(base, correction=CORRECTIONS["seq_is"]), runs)
        failure, ess = failure_steps(weighted.returns, on.returns), weighted.ess_steps()
        measured |= {
            f"ess_step, {name}, median": float(np.median(ess)),
            f"failure_step, {name}, median": float(np.quantile(failure, 0.5, method="lower")),
            f"failure_step, {name}, first": float(failure.min()),
            f"failure_step, {name}, last": float(failure.max()),
            f"fresh on-policy runs called failed, {name}": float(
                np.isfinite(failure_steps(fresh.returns, on.returns)).mean()
            ),
        }
        ratios_.append(failure / ess)
        early.append(failure < ess)
    ratio, before = np.concatenate(ratios_), float(np.concatenate(early).mean())

    def median(x: np.ndarray) -> float:
        return float(np.quantile(x, 0.5, method="lower"))

    low, high = bootstrap(median, ratio)
    holds = 1 / threshold <= low and high <= threshold
    measured |= {"share failing before ess_step": before}
    reason = f"the return falls {median(ratio):.2g} times as late as the ESS (median), {before:.0%} of runs earlier"
    table = pl.DataFrame({"ratio": ratio})
    return Outcome(median(ratio), judge(holds), reason, len(ratio), (low, high), measured, table)


def dlc_stays_near_on_policy(threshold: float, fast: bool) -> Outcome:
    """C6. KL of whole sequences at the end, in units of the KL between two independent on-policy trainings."""
    runs, worst, measured = (5 if fast else 16), (0.0, math.nan, math.nan), {}
    for name in SETTINGS:
        problem, cfg = setting(name)
        cfg = replace(cfg, steps=updates(name, fast))
        on = train(name, replace(cfg, resync=EveryK(1)), runs, ON_POLICY_FIRST)
        stale = replace(cfg, correction=CORRECTIONS["dlc"], resync=EssBelow(), discrepancy=ConstantOffset(0.1))
        dlc = train(name, stale, runs)
        pi, reference = log_policy(dlc.logits), log_policy(on.logits)
        between = _divergences(problem, reference, reference)
        for who, policy in (("pi", pi), ("q", log_policy(pi + dlc.log_offset))):
            away = _divergences(problem, policy, reference)
            value, low, high = _ratio_interval(away, between)
            measured |= {
                f"{name}: KL({who} || on-policy)": float(away.mean()),
                f"{name}: ratio, {who}": [value, low, high],
            }
            worst = max(worst, (value, low, high))
        lagging = train(name, replace(stale, discrepancy=ConstantOffset()), runs)
        away = _divergences(problem, log_policy(lagging.logits), reference)
        measured[f"{name}: ratio, pi, lag alone"] = list(_ratio_interval(away, between))
        measured[f"{name}: KL between on-policy trainings"] = float(between[~np.eye(runs, dtype=bool)].mean())
        measured[f"{name}: return less on-policy"] = difference(dlc.final, on.final)
    unique = [measured[f"penalised: ratio, {who}"] for who in ("pi", "q")]
    sparse = [measured[f"{name}: ratio, {who}"] for name in ("machine", "tree") for who in ("pi", "q")]
    value, low, high = max(*unique, *sparse)
    reason = (
        f"one optimum: {_verdicts(unique, threshold)}; sparse rewards, pi and q on the machine, then the tree:"
        f" {_verdicts(sparse, threshold)}"
    )
    return Outcome(
        value, judge(all(x[2] <= threshold for x in (*unique, *sparse))), reason, runs, (low, high), measured
    )


def _verdicts(intervals: list[list[float]], threshold: float) -> str:
    return ", ".join(f"{x[0]:.2g} {'within' if x[2] <= threshold else 'not within'}" for x in intervals)


def _divergences(problem, first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """KL(first_i || second_j) of whole sequences. (R, S, V), (m, S, V) -> (R, m)"""
    return exact.kl(problem, first[:, None], second[None])


def _ratio_interval(away: np.ndarray, between: np.ndarray) -> tuple[float, float, float]:
    """mean(away) over the mean of between's pairs of different runs, and its bootstrap interval over both groups."""
    rng, values = np.random.default_rng(0), []
    pairs = ~np.eye(len(between), dtype=bool)
    for _ in range(500):
        i, j = rng.integers(len(away), size=len(away)), rng.integers(len(between), size=len(between))
        different = j[:, None] != j  # a run drawn twice is no pair of independent trainings
        if not different.any():
            continue
        values.append(away[np.ix_(i, j)].mean() / between[np.ix_(j, j)][different].mean())
    return float(away.mean() / between[pairs].mean()), *map(float, np.quantile(values, [0.025, 0.975]))


def resync_prevents(threshold: float, fast: bool) -> Outcome:
    """C7. Token TIS and DLC, discrepancy .05: never synced against synced at ESS < 1/2; what the per-token KL said."""
    runs, measured, missed, verdicts, worst = (6 if fast else 24), {}, [], [], (-math.inf, math.nan, math.nan)
    for name in ("machine", "penalised"):
        base = replace(setting(name).cfg, steps=updates(name, fast))
        on = train(name, replace(base, resync=EveryK(1)), runs, ON_POLICY_FIRST)
        gain = on.final.mean() - on.returns[0, 0]
        for correction in ("tis", "dlc"):
            cfg = replace(base, correction=CORRECTIONS[correction], discrepancy=ConstantOffset(0.05))
            never, synced = train(name, cfg, runs), train(name, replace(cfg, resync=EssBelow()), runs)
            loss, kept = ((on.final.mean() - x.final) / gain for x in (never, synced))
            first = (never.ess < 0.5).argmax(axis=1)
            kl = never.token_kl[np.arange(runs), first]
            low, high = bootstrap(lambda a, b: float((b.mean() - a.mean()) / gain), synced.final, on.final)
            collapsed = (
                bootstrap(lambda a, b: float((b.mean() - a.mean()) / gain), never.final, on.final)[0] > threshold
            )
            verdicts.append((collapsed, high <= threshold, float(kl.mean()) <= HEALTHY_KL))
            worst = max(worst, (float(kept.mean()), low, high))
            key = f"{name}, {correction}"
            measured |= {
                f"{key}: share of the gain lost, never synced": float(loss.mean()),
                f"{key}: share lost, synced": [float(kept.mean()), low, high],
                f"{key}: syncs": float(synced.syncs.mean()),
                f"{key}: token KL at ess_step": float(kl.mean()),
                f"{key}: ess_step": float(np.median(never.ess_steps())),
                f"{key}: failure_step": float(
                    np.quantile(failure_steps(never.returns, on.returns), 0.5, method="lower")
                ),
            }
    collapsed, prevented, missed = (sum(x) for x in zip(*verdicts, strict=True))
    reason = (
        f"of {len(verdicts)} (problem, correction): {collapsed} collapse without a sync, {prevented} do not with it,"
        f" in {missed} the per-token KL is below {HEALTHY_KL:g} at ess_step"
    )
    holds = collapsed == prevented == missed == len(verdicts)
    return Outcome(worst[0], judge(holds), reason, runs, worst[1:], measured)


@dataclass(frozen=True)
class RaisedCIS:
    """CIS that also raises: the log-odds displacement is held within [-cap, cap]. The ablation of C8."""

    cap: float = math.log(2.0)
    centres = False
    factors = True

    def __call__(self, batch: Batch) -> Corrected:
        xp = namespace(batch.logp_train)
        logp_rollout = masked(batch.logp_rollout, batch.mask)
        weight = ratios.log_odds_cap(detach(batch.total), logp_rollout, self.cap)
        # the weight of a displacement by -cap, which a smaller one is raised to
        shrink = math.exp(-self.cap)
        least = shrink / (1 + xp.exp(logp_rollout) * (shrink - 1))
        return Corrected(xp.maximum(weight, least), batch.mask, 0.0)


def calibrated_weights(threshold: float, fast: bool) -> Outcome:
    """C8. The bound over random policies; the excess; then training with small weights raised, same seeds."""
    rng, most, excess = np.random.default_rng(0), 0.0, 0.0
    for _ in range(200 if fast else 2000):
        cap, size = rng.uniform(0.05, 2), rng.integers(2, 30)
        logits = rng.normal(size=(16, size)) * rng.uniform(0.2, 3)
        now = policies(logits + rng.normal(size=logits.shape) * rng.uniform(0.1, 4), logits)
        weight, rho = exact.token_weights(now, CIS(cap)).weight, np.exp(now.train - now.rollout)
        q, pi = np.exp(now.rollout), np.exp(now.train)
        most = max(most, float(((q * weight**2).sum(axis=-1) / math.exp(cap)).max()))
        below = np.log(pi / (1 - pi)) - np.log(q / (1 - q)) <= cap - 1e-9
        excess = max(excess, float(np.abs(weight / rho - 1)[below].max(initial=0)))
    runs, worst, measured = (6 if fast else 24), (-math.inf, math.nan, math.nan), {}
    for name in ("machine", "penalised"):
        for k in (16, 64):
            cfg = replace(setting(name).cfg, steps=updates(name, fast), resync=EveryK(k))
            cfg = replace(cfg, discrepancy=ConstantOffset(0.3))
            plain, raised = (train(name, replace(cfg, correction=c), runs).final for c in (CIS(), RaisedCIS()))
            low, high = bootstrap(difference, raised, plain, paired=True)
            measured[f"{name}, sync every {k}: raised less plain"] = [difference(raised, plain), low, high]
            worst = max(worst, (difference(raised, plain), low, high))
    hurts = all(x[2] < threshold for x in measured.values())
    measured = {"largest E_q[w^2] / e^cap": most, "weights off below the cap": excess} | measured
    bounded = most <= 1 + 1e-12 and excess <= 1e-9
    reason = (
        f"bound and excess: {'hold' if bounded else 'fail'}; raising hurts in every case: {'yes' if hurts else 'no'}"
    )
    return Outcome(worst[0], judge(bounded and hurts), reason, runs, worst[1:], measured)


def small_numerics_alone(threshold: float, fast: bool) -> Outcome:
    """C9. Constant offset, synced after every update, uncorrected; share of the gain lost against an exact sampler."""
    runs, measured, worst, rows = (5 if fast else 16), {}, (-math.inf, math.nan, math.nan), []
    for name in SETTINGS:
        base = replace(setting(name).cfg, steps=updates(name, fast), resync=EveryK(1))
        on = train(name, base, runs, ON_POLICY_FIRST)
        gain = on.final.mean() - on.returns[0, 0]
        for sd in (0.0, 0.02, 0.05, 0.2):
            run = train(name, replace(base, discrepancy=ConstantOffset(sd)), runs)
            lost = float((on.final.mean() - run.final.mean()) / gain)
            low, high = bootstrap(lambda a, b, gain=gain: float((b.mean() - a.mean()) / gain), run.final, on.final)
            kl = float(run.token_kl[:, -1].mean())
            failed = float(np.isfinite(failure_steps(run.returns, on.returns)).mean())
            rows.append({"problem": name, "sd": sd, "lost": lost, "token_kl": kl, "failed": failed})
            measured[f"{name}, sd {sd:g}: share lost"] = [lost, low, high]
            measured[f"{name}, sd {sd:g}: failing runs"] = failed
            if 0 < sd <= 0.05:
                worst = max(worst, (lost, low, high))
    table = pl.DataFrame(rows)
    exact_lost = max(abs(measured[f"{name}, sd 0: share lost"][0]) for name in SETTINGS)
    reason = f"the largest loss at sd <= .05 is {worst[0]:.2g} of the gain; an exact sampler loses {exact_lost:.2g}"
    return Outcome(worst[0], judge(worst[1] > threshold), reason, runs, worst[1:], measured, table)


def exact_sampler_has_no_kl(threshold: float, fast: bool) -> Outcome:
    """C10. On-policy training with an exact sampler: largest |log pi - log q| of any token before any update."""
    problem, base = setting("machine")
    cfg, rngs = replace(base, resync=EveryK(1)), simulate.generators(0, range(2))
    state, most, steps = simulate.init(rngs, problem, np.zeros(problem.shape), cfg), 0.0, 20 if fast else 100
    for _ in range(steps):
        most = max(most, float(np.abs(state.policies.train - state.policies.rollout).max()))
        state, _ = simulate.step(rngs, problem, state, cfg)
    return Outcome(most, "by construction", "without an offset q is computed by the code that computes mu", steps)


def source_by_correction(threshold: float, fast: bool) -> Outcome:
    """C11. Share of the on-policy gain that each correction loses under each source alone, and both."""
    runs, rows, measured = (5 if fast else 16), [], {}
    sources = {
        "discrepancy": {"discrepancy": ConstantOffset(0.2), "resync": EveryK(1)},
        "lag": {"resync": Never()},
        "both": {"discrepancy": ConstantOffset(0.2), "resync": Never()},
    }
    for name in ("machine", "tree"):
        base = replace(setting(name).cfg, steps=updates(name, fast))
        on = train(name, replace(base, resync=EveryK(1)), runs, ON_POLICY_FIRST).final
        gain = on.mean() - train(name, replace(base, resync=EveryK(1)), runs, ON_POLICY_FIRST).returns[0, 0]
        for correction in C11_CORRECTIONS:
            row: dict[str, object] = {"problem": name, "correction": correction}
            for source, how in sources.items():
                final = train(name, replace(base, correction=CORRECTIONS[correction], **how), runs).final
                low, high = bootstrap(lambda a, b, gain=gain: float((b.mean() - a.mean()) / gain), final, on)
                row |= {source: float((on.mean() - final.mean()) / gain), f"{source}_low": low, f"{source}_high": high}
                measured[f"{name}, {correction}, {source}"] = [row[source], low, high]
            rows.append(row)
    table = pl.DataFrame(rows)
    stable = {s: pl.col(f"{s}_high") <= threshold for s in sources}
    fails = {s: pl.col(f"{s}_low") > threshold for s in sources}
    here = (stable["discrepancy"] & fails["lag"]) | (stable["lag"] & fails["discrepancy"])
    found = table.filter(here)
    names = ", ".join(f"{r['correction']} on the {r['problem']}" for r in found.to_dicts()) or "none"
    apart = (table["lag"] - table["discrepancy"]).abs().max()
    return Outcome(
        float(apart),
        judge(len(found) > 0),
        f"stable under one, failing under the other: {names}",
        runs,
        measured=measured,
        table=table,
    )  # type: ignore[arg-type]


C11_CORRECTIONS = ("none", "tis", "cis", "dlc", "icepop", "ppo", "seq_tis", "seq_is")
