"""The experiments behind N1 to N7: neighbouring results (THEORY section 9) reproduced, located or contradicted here.

Each takes the threshold of its criterion and `fast`, and returns an `Outcome`; `claims.py` states the criteria.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import polars as pl
from scipy.optimize import brentq

from sandbox import delay, diagnostics, enumeration, exact, simulate, theory
from sandbox.collapse import var_threshold
from sandbox.corrections import CORRECTIONS
from sandbox.mismatch import ConstantOffset, EssBelow, EveryK
from sandbox.policy import Policies, draw, log_policy, policies
from sandbox.problems import PRESETS, Problem
from sandbox.simulate import SimConfig
from sandbox.verdicts import Outcome, compared, difference, judge, setting, train, updates

# what is applied of (update, the one before, batch ESS): (R, S, V), (R, S, V), (R,) -> (R, S, V)
StepRule = Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray]


def as_it_is(update: np.ndarray, before: np.ndarray, ess: np.ndarray) -> np.ndarray:
    return update


def times_ess(update: np.ndarray, before: np.ndarray, ess: np.ndarray) -> np.ndarray:
    """VCPO's rule: the learning rate times the raw sequence lag ESS of the batch."""
    return ess[:, None, None] * update


def projected(update: np.ndarray, before: np.ndarray, ess: np.ndarray) -> np.ndarray:
    """GAC's rule in its plainest form: without the component along the update before, where that is positive."""
    along, square = (np.einsum("rsv,rsv->r", x, before) for x in (update, before))
    share = np.maximum(along, 0) / np.maximum(square, 1e-300)
    return update - share[:, None, None] * before


class Followed(NamedTuple):
    """final: mean return over the last tenth of the updates, (R,). cosine: of successive updates, (K - 1, R)."""

    final: np.ndarray
    cosine: np.ndarray


@lru_cache(maxsize=64)
def follow(name: str, cfg: SimConfig, runs: int, rule: StepRule = as_it_is) -> Followed:
    """Training with a step rule; `simulate.update` is the update that it is given."""
    problem, _ = setting(name, cfg.seed)
    rngs = simulate.generators(cfg.seed, range(runs))
    trainer = sampler = simulate.init(rngs, problem, np.zeros(problem.shape), cfg).trainer
    now, before, since, run = policies(trainer, sampler), np.zeros_like(trainer), 0, np.arange(runs)[:, None, None]
    returns, cosine = [], []
    for _ in range(cfg.steps):
        pairs = draw(problem, now.rollout, np.stack([r.random((cfg.batch_size, problem.horizon)) for r in rngs]))
        lag = (now.train - now.sync).reshape(runs, -1)[run, pairs]
        ess = diagnostics.ess(np.where(pairs >= 0, lag, 0.0).sum(axis=-1))
        update = simulate.update(problem, now, pairs, cfg)
        if cfg.penalty:
            update = update - cfg.penalty * np.stack([exact.kl_gradient(problem, train) for train in now.train])
        trainer = trainer + cfg.step_size * rule(update, before, ess)
        cosine.append(_cosine(update, before))
        before, since = update, since + 1
        if cfg.resync(since, float(ess.mean()), 0.0):
            sampler, since = trainer, 0
        now = policies(trainer, sampler)
        returns.append(exact.expectation(problem, now.train, problem.reward))
    return Followed(np.mean(returns[-(cfg.steps // 10) :], axis=0), np.array(cosine[1:]))


def _cosine(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    a, b = (x.reshape(len(x), -1) for x in (a, b))
    return (a * b).sum(axis=1) / np.maximum(np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1), 1e-300)


def rate_times_ess(threshold: float, fast: bool, seed: int = 0) -> Outcome:
    """N1. Equal sampling: the same batches per run; the fixed periods are DLC's own mean interval, and four of them.

    An eightfold rate, where staleness hurts more, is measured beside it.
    """
    runs, measured, gains = (3 if fast else 12), {}, []
    for rate in (1, 8):
        base = replace(setting("machine", seed).cfg, steps=updates("machine", fast))
        base = replace(base, step_size=rate * base.step_size)
        dlc = train("machine", replace(base, correction=CORRECTIONS["dlc"], resync=EssBelow()), runs)
        own = max(1, round(base.steps / dlc.syncs.mean()))
        for period in (own, 4 * own):
            cfg = replace(base, correction=CORRECTIONS["seq_tis"], resync=EveryK(period))
            plain, scaled = (follow("machine", cfg, runs, rule).final for rule in (as_it_is, times_ess))
            key = f"rate x {rate}, sync every {period}: lr x ESS"
            measured[f"{key} less lr"] = compared(difference, scaled, plain, paired=True)
            measured[f"{key} less DLC with resync"] = compared(difference, scaled, dlc.final)
            gains.append(measured[f"{key} less lr"])
    measured |= _baselines(seed)
    worst = min(gains[:2])
    words = ", ".join(f"{gain[0]:+.2g}" for gain in gains)
    reason = f"return gained at both periods, at one and at eight times the rate: {words}"
    return Outcome(worst[0], judge(worst[1] > threshold), reason, runs, (worst[1], worst[2]), measured)


class Spread(NamedTuple):
    """Total variance over responses of w (R - b) sum_t (e_a - pi), w = pi/q of the sequence, and the baselines b."""

    plain: float  # b = E_q[R]
    least: float  # b = E_q[w^2 |score|^2 R] / E_q[w^2 |score|^2], VCPO's off-policy optimal baseline
    rms: float  # root mean square of the plain estimator's norm: what a dashboard calls the gradient norm
    baseline: float
    optimal: float


def spread(problem: Problem, now: Policies) -> Spread:
    """By enumeration, where no state repeats on a path, so that |score|^2 is a sum over the tokens."""
    pairs = enumeration.sequences(problem)
    mask = pairs >= 0
    pi, q, reward = (
        np.where(mask, x.ravel()[pairs], 0.0).sum(axis=1) for x in (now.train, now.rollout, problem.reward)
    )
    p = np.exp(now.train)
    square = np.where(mask, (1 - 2 * p + (p**2).sum(axis=1, keepdims=True)).ravel()[pairs], 0.0).sum(axis=1)
    heavy = np.exp(2 * pi - q) * square  # q w^2 |score|^2
    plain, optimal = float((np.exp(q) * reward).sum()), float((heavy * reward).sum() / heavy.sum())
    drift = float((exact.gradient(problem, now.train) ** 2).sum())
    moments = [float((heavy * (reward - b) ** 2).sum()) for b in (plain, optimal)]
    return Spread(moments[0] - drift, moments[1] - drift, math.sqrt(moments[0]), plain, optimal)


def _baselines(seed: int) -> dict[str, float]:
    """The exact spread along corrected mean-field training of the sparse tree, never synced, where the ESS first is
    below each level: variance left by the optimal baseline, and growth of the gradient norm since the sync."""
    problem, x = PRESETS["sparse_tree"](seed).problem, np.zeros(PRESETS["sparse_tree"](seed).problem.shape)
    fresh, found = spread(problem, policies(x, x)), {}
    start, levels = x, [0.9, 0.5, 0.1]
    for _ in range(200):
        now = policies(x, start)
        while levels and exact.ess(problem, now.train, now.sync) < levels[0]:
            here, level = spread(problem, now), levels.pop(0)
            found[f"ESS {level}: variance with the optimal baseline over E[R]'s"] = here.least / here.plain
            found[f"ESS {level}: gradient norm over that at the sync"] = here.rms / fresh.rms
        x = x + 0.25 * exact.expected_update(problem, now, CORRECTIONS["seq_is"], "normalised")
    return {"ESS 1: variance with the optimal baseline over E[R]'s": fresh.least / fresh.plain} | found


def stale_updates_align(threshold: float, fast: bool, seed: int = 0) -> Outcome:
    """N2. Cosine of successive batch updates in the later half of training, token TIS; and of the exact ones."""
    runs, measured, cosines = (3 if fast else 12), {}, {}
    base = replace(setting("machine", seed).cfg, steps=updates("machine", fast), correction=CORRECTIONS["tis"])
    for name, k in (("synchronous", 1), ("stale", 16)):
        done = follow("machine", replace(base, resync=EveryK(k)), runs)
        half = len(done.cosine) // 2
        cosines[name] = done.cosine[half:].mean(axis=0)
        measured[f"{name}: later half"] = compared(lambda x: x.mean(axis=-1), cosines[name])
        measured[f"{name}: first 16"] = float(done.cosine[:16].mean())
        measured[f"{name}: exact updates, first 16"] = float(np.mean(_exact_cosines(k, 17, seed)))
        at_rest = replace(
            setting("penalised", seed).cfg, steps=updates("penalised", fast), correction=CORRECTIONS["tis"]
        )
        done = follow("penalised", replace(at_rest, resync=EveryK(k)), runs).cosine
        measured[f"{name}: at an optimum"] = compared(lambda x: x.mean(axis=-1), done[-50:].mean(axis=0))
    plain = follow("machine", replace(base, resync=EveryK(16)), runs).final
    without = follow("machine", replace(base, resync=EveryK(16)), runs, projected).final
    measured["return, projected less plain, stale"] = compared(difference, without, plain, paired=True)
    stale, fresh = measured["stale: later half"], measured["synchronous: later half"]
    reason = (
        f"later half: {stale[0]:.2g} stale against {fresh[0]:.2g} synchronous; at an optimum"
        f" {measured['stale: at an optimum'][0]:.2g} against {measured['synchronous: at an optimum'][0]:.2g}"
    )
    holds = stale[1] >= threshold and fresh[2] <= 0.2
    return Outcome(stale[0], judge(holds), reason, runs, (stale[1], stale[2]), measured)


def _exact_cosines(period: int, steps: int, seed: int) -> list[float]:
    """Of successive expected updates under token TIS on the machine, synced every `period`."""
    problem, cfg = setting("machine", seed)
    trainer = sampler = before = np.zeros(problem.shape)
    found = []
    for k in range(steps):
        update = exact.expected_update(problem, policies(trainer, sampler), CORRECTIONS["tis"], "normalised")
        found.append(float(_cosine(update[None], before[None])[0]))
        trainer, before = trainer + cfg.step_size * update, update
        if (k + 1) % period == 0:
            sampler = trainer
    return found[1:]


def staleness_times_rate(threshold: float, fast: bool, seed: int = 0) -> Outcome:
    """N3. ess_step times eta, interpolated between updates, over a sixteen-fold range; noise alone; a constant lag."""
    case = PRESETS["machine"](seed)
    problem, logits, rows = case.problem, case.sampler_logits, []
    for eta in np.geomspace(0.005, 0.08, 3 if fast else 5):
        table = theory.mean_field(problem, logits, CORRECTIONS["none"], float(eta), int(1.2 / eta)).table
        d2 = np.concatenate([[0.0], -np.log(table["ess"].to_numpy())])
        passed = d2 >= var_threshold(0.5)
        if not passed.any():
            return Outcome(math.inf, "not tested", f"the ESS stays above 1/2 at eta = {eta:.3g}", len(rows) + 1)
        at = int(passed.argmax())
        step = at - 1 + (var_threshold(0.5) - d2[at - 1]) / (d2[at] - d2[at - 1])
        rows.append({"eta": float(eta), "ess_step": float(step), "product": float(step * eta)})
    table = pl.DataFrame(rows)
    spread = float(table["product"].max() / table["product"].min())  # type: ignore[operator]
    # Noise alone, Var = b k with b proportional to eta^2: what a step of N = 2 responses would be dominated by
    tree = PRESETS["sparse_tree"](seed)
    steps = [theory.closed_form(tree.problem, 0 * tree.logits, eta, 2) for eta in (0.05, 0.1)]
    by_noise, by_drift = ([root(p.a, p.b) for p in steps] for root in (_noise_step, _drift_step))
    delays = [tau * delay.critical_gain(tau) for tau in (1, 2, 4, 8, 64)]
    measured = {
        "ess_step at the smallest eta": rows[0]["ess_step"],
        "ess_step at the largest eta": rows[-1]["ess_step"],
        "exponent of ess_step in eta, noise alone": math.log2(by_noise[1] / by_noise[0]),
        "exponent of ess_step in eta, drift alone": math.log2(by_drift[1] / by_drift[0]),
        "critical tau x eta kappa, tau = 1": delays[0],
        "critical tau x eta kappa, tau = 64": delays[-1],
    }
    reason = (
        f"S eta decides to a factor {spread:.3g} where drift dominates; where noise does, S eta^2 decides; for a"
        f" constant lag the critical product moves from {delays[0]:.3g} to {delays[-1]:.3g}"
    )
    return Outcome(spread, judge(spread <= threshold), reason, len(rows), measured=measured, table=table)


def _noise_step(a: float, b: float) -> float:
    return var_threshold(0.5) / b


def _drift_step(a: float, b: float) -> float:
    return math.sqrt(var_threshold(0.5) / a)


def not_identifiable(threshold: float, fast: bool, seed: int = 0) -> Outcome:
    """N4. Two worlds with the same pi and q: all of the mismatch is lag in one, all of it discrepancy in the other."""
    case = PRESETS["machine"](seed)
    pi, q = log_policy(case.logits), log_policy(case.sampler_logits + case.sampler_log_offset)
    worlds = {"lag": Policies(pi, q, q), "discrepancy": Policies(pi, pi, q)}
    lagging, numeric = worlds.values()
    gap = max(float(np.abs(lagging[i] - numeric[i]).max()) for i in (0, 2))
    shares = {}
    for name, (train_, sync, rollout) in worlds.items():
        d, g = sync - rollout, train_ - sync
        shares[f"lag share in the world of {name}"] = float((g**2).mean() / ((d**2).mean() + (g**2).mean()))
    reason = "pi and q are the same in both, the lag's share is 1 in one and 0 in the other"
    return Outcome(gap, "by construction", reason, pi.size, measured=shares)


def elsewhere(threshold: float, fast: bool, seed: int = 0) -> Outcome:
    """N5."""
    return Outcome(math.nan, "not tested", "the tabular experiments are C9 and C10; throughput needs an engine", 0)


def rate_and_sources(threshold: float, fast: bool, seed: int = 0) -> Outcome:
    """N6. Mean-field, token TIS, an offset: RMS of lag and discrepancy ten updates after a sync, against eta."""
    case, rows = PRESETS["machine"](seed), []
    problem, offset = case.problem, case.sampler_log_offset
    for eta in (0.00125, 0.0025, 0.005, 0.01, 0.02):
        x = np.zeros(problem.shape)
        for _ in range(10):
            now = policies(case.sampler_logits + x, case.sampler_logits, offset)
            x = x + eta * exact.expected_update(problem, now, CORRECTIONS["tis"], "normalised")
        pi, mu, q = policies(case.sampler_logits + x, case.sampler_logits, offset)
        rms = {name: float(np.sqrt((x**2).mean())) for name, x in (("d", mu - q), ("g", pi - mu))}
        rows.append({"eta": eta, **rms})
    table = pl.DataFrame(rows)
    log_eta = np.log(table["eta"].to_numpy())
    slope = {name: float(np.polyfit(log_eta, np.log(table[name].to_numpy()), 1)[0]) for name in ("d", "g")}
    moved = float(table["d"].max() - table["d"].min())  # type: ignore[operator]
    measured = {"change of rms d over the range": moved, "exponent of d in eta": slope["d"]}
    reason = f"g grows as eta^{slope['g']:.3g}, d moves by {moved:.1g}: a decayed rate removes the lag alone"
    holds = abs(slope["g"] - 1) <= threshold and moved == 0
    return Outcome(slope["g"], judge(holds), reason, len(rows), measured=measured, table=table)


def sequence_weights_die(threshold: float, fast: bool, seed: int = 0) -> Outcome:
    """N7. Discrepancy alone, synced after every update: T x KL where ESS is 1/2, and where sequence TIS loses half.

    The second is read off a grid of factors of four in KL: it has the grid's resolution and no interval.
    """
    base, logits = PRESETS["machine"](seed).problem, PRESETS["machine"](seed).sampler_logits
    measured, rows, runs, half = {}, [], (3 if fast else 8), []
    offset = np.random.default_rng(seed).normal(size=base.shape)
    for horizon in (16, 256, 4096):
        problem, logp = replace(base, horizon=horizon), log_policy(logits)

        def excess(log_sd: float, problem=problem, logp=logp) -> float:
            return float(exact.ess(problem, logp, log_policy(logp + math.exp(log_sd) * offset))) - 0.5

        q = log_policy(logp + math.exp(brentq(excess, -12.0, 0.0)) * offset)  # type: ignore[arg-type]
        measured[f"T x KL at ESS = 1/2, T = {horizon}"] = float(exact.kl(problem, q, logp))
    for horizon in (64,) if fast else (64, 256):
        rows += _phase_rows(replace(base, horizon=horizon), runs, 60 if fast else 120, seed)
        here = pl.DataFrame(rows).filter(pl.col("horizon") == horizon)
        for correction in ("tis", "seq_tis"):
            dead = here.filter((pl.col("correction") == correction) & (pl.col("lost") > 0.5))["t_kl"]
            at = float(dead.min()) if len(dead) else math.inf  # type: ignore[arg-type]
            measured[f"least T x KL at which {correction} loses half, T = {horizon}"] = at
            half += [at] if correction == "seq_tis" else []
    table = pl.DataFrame(rows)
    inside = [20 / threshold <= at <= 20 * threshold for at in half]
    reason = (
        f"sequence TIS first loses half of the gain at T x KL = {', '.join(f'{at:.2g}' for at in half)}; ESS is 1/2 at"
        f" {measured['T x KL at ESS = 1/2, T = 4096']:.2g} whatever T"
    )
    return Outcome(half[0], judge(all(inside)), reason, runs, measured=measured, table=table)


def _phase_rows(problem: Problem, runs: int, steps: int, seed: int) -> list[dict]:
    """Share of the on-policy gain that token and sequence TIS lose under a discrepancy alone; T x KL at the start."""
    cfg, start, rows = replace(setting("machine", seed).cfg, steps=steps, resync=EveryK(1)), np.zeros(problem.shape), []

    def final(cfg: SimConfig, first: int = 0) -> float:
        table = simulate.run(problem, start, cfg, range(first, first + runs), threads=2).table
        return float(table.filter(pl.col("step") == steps)["return"].mean())  # type: ignore[arg-type]

    on = final(cfg, first=1000)
    before = float(exact.expectation(problem, log_policy(start), problem.reward))
    for sd in (0.1, 0.2, 0.4, 0.8):
        for correction in ("tis", "seq_tis"):
            done = final(replace(cfg, correction=CORRECTIONS[correction], discrepancy=ConstantOffset(sd)))
            t_kl = problem.horizon * _uniform_token_kl(problem, sd, seed)
            lost = (on - done) / (on - before)
            rows.append({"horizon": problem.horizon, "correction": correction, "sd": sd, "t_kl": t_kl, "lost": lost})
    return rows


def _uniform_token_kl(problem: Problem, sd: float, seed: int) -> float:
    """KL(q || pi) per token at the uniform start, mean over 16 draws of the offset. nats"""
    logp = log_policy(np.zeros(problem.shape))
    offsets = sd * np.random.default_rng(seed + 1).normal(size=(16, *problem.shape))
    return float(exact.token_kl(problem, logp, log_policy(logp + offsets)).mean())
