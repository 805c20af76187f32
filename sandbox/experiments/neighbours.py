"""The experiments behind N1 to N7: neighbouring results (THEORY section 9) reproduced, located or contradicted here.

Each takes the threshold of its criterion and `fast`, and returns an `Outcome`; `claims.py` states the criteria.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import polars as pl
from scipy.optimize import brentq

from sandbox.corrections import CORRECTIONS, EssBelow, EveryK
from sandbox.experiments import baseline
from sandbox.experiments.verdicts import Outcome, compared, difference, judge, setting, train, updates
from sandbox.metrics import estimators
from sandbox.tabular import exact, simulate
from sandbox.tabular.policy import ConstantOffset, GivenOffset, Policies, log_policy, policies
from sandbox.tabular.problems import PRESETS, Problem
from sandbox.tabular.simulate import SimConfig
from sandbox.theory import delay, lag, levels
from sandbox.theory.collapse import var_threshold

# what is applied of (update, the one before, batch ESS): (R, S, V), (R, S, V), (R,) -> (R, S, V)
StepRule = Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray]


def as_it_is(update: np.ndarray, before: np.ndarray, ess: np.ndarray) -> np.ndarray:
    """The plain update. (R, S, V)"""
    return update


def times_ess(update: np.ndarray, before: np.ndarray, ess: np.ndarray) -> np.ndarray:
    """VCPO's rule: the learning rate times the raw sequence lag ESS of the batch. ess (R,)"""
    return ess[:, None, None] * update


def projected(update: np.ndarray, before: np.ndarray, ess: np.ndarray) -> np.ndarray:
    """GAC's rule in its plainest form: without the component along the one before, where positive. (R, S, V)"""
    along, square = (np.einsum("rsv,rsv->r", x, before) for x in (update, before))
    share = np.maximum(along, 0) / np.maximum(square, 1e-300)
    return update - share[:, None, None] * before


class Ruled(NamedTuple):
    """final: mean return over the last tenth of the updates, (R,). cosine: of successive updates, (K - 1, R)."""

    final: np.ndarray
    cosine: np.ndarray


@lru_cache(maxsize=64)
def follow(name: str, cfg: SimConfig, runs: int, rule: StepRule = as_it_is) -> Ruled:
    """Training with a step rule; `simulate.update` is the update that it is given."""
    problem, _ = setting(name, cfg.seed)
    before, cosine = np.zeros((runs, *problem.shape)), []

    def propose(pairs: np.ndarray, now: Policies) -> tuple[np.ndarray, np.ndarray]:
        nonlocal before
        ess = estimators.ess(baseline.along(now.train - now.sync, pairs))
        update = simulate.update(problem, now, pairs, cfg)
        if cfg.penalty:
            update = update - cfg.penalty * np.stack([exact.kl_gradient(problem, train) for train in now.train])
        cosine.append(_cosine(update, before))
        applied, before = rule(update, before, ess), update
        return applied, ess

    returns = baseline.follow(problem, cfg, runs, propose).returns
    return Ruled(returns[:, -(cfg.steps // 10) :].mean(axis=1), np.array(cosine[1:]))


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
    measured |= baseline.exactly(seed) | baseline.trained(4 if fast else 16, fast, seed)
    worst = min(gains[:2])
    words = ", ".join(f"{gain[0]:+.2g}" for gain in gains)
    alarms = measured[baseline.ALARMS]
    helped = measured["tree, never synced: optimal baseline (batch) less mean reward"]
    first = "the norm" if alarms[1] > 0 else "the ESS" if alarms[2] < 0 else "neither"
    reason = (
        f"return gained at both periods, at one and at eight times the rate: {words}; by the optimal baseline, never"
        f" synced: {helped[0]:+.2g} ({helped[1]:+.2g} to {helped[2]:+.2g}); the earlier alarm: {first}, by"
        f" {abs(alarms[0]):.2g} updates"
    )
    return Outcome(worst[0], judge(worst[1] > threshold), reason, runs, (worst[1], worst[2]), measured)


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
        table = levels.mean_field(problem, logits, SimConfig(step_size=float(eta), steps=int(1.2 / eta))).table
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
    steps = [levels.closed_form(tree.problem, 0 * tree.logits, eta, 2) for eta in (0.05, 0.1)]
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
    reason = (
        "not tested here, because the price of a zero-mismatch engine (91.3 % of the throughput) needs an engine with"
        " batch-invariant kernels on a GPU; its first half is C9's, that an exact engine has no KL is C10's"
    )
    return Outcome(math.nan, "not tested", reason, 0)


def rate_and_sources(threshold: float, fast: bool, seed: int = 0) -> Outcome:
    """N6. Mean-field, token TIS, an offset: RMS of lag and discrepancy ten updates after a sync, against eta."""
    case, rows = PRESETS["machine"](seed), []
    problem, offset = case.problem, case.sampler_log_offset
    for eta in (0.00125, 0.0025, 0.005, 0.01, 0.02):
        cfg = SimConfig(CORRECTIONS["tis"], discrepancy=GivenOffset(offset), step_size=eta, steps=10)
        x = lag.path(problem, case.sampler_logits, cfg)[-1]
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
    """N7. T x KL where ESS is 1/2, and where token and sequence TIS lose half, over horizon, discrepancy and lag.

    The second is read off a grid of factors of sqrt(2) in KL (of 2 where the sampler lags by up to eight updates): it
    has the grid's resolution and no interval. Without lag the sampler is synced after every update.
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
    grid: dict[int, dict[str, Sequence[float]]] = {1: {"tis": (4, 16), "seq_tis": (1, 4, 16)}}  # period, correction
    if not fast:
        grid[1] = {"tis": (4, 16, 32), "seq_tis": tuple(2 ** (i / 2) for i in range(7))}
        grid[8] = {"tis": (4, 16, 32), "seq_tis": (1, 2, 4)}
    for horizon in (64,) if fast else (32, 64, 256):
        problem = replace(base, horizon=horizon)
        here = _phase_rows(problem, runs, 60 if fast else 120, seed, grid)
        rows += here
        for period in grid:
            for correction in ("tis", "seq_tis"):
                mine = [x for x in here if (x["period"], x["correction"]) == (period, correction)]
                at = min((x["t_kl"] for x in mine if x["lost"] > 0.5), default=math.inf)
                measured[f"least T x KL at which {correction} loses half, T = {horizon}, synced every {period}"] = at
                measured[f"most that {correction} loses, T = {horizon}, synced every {period}"] = max(
                    x["lost"] for x in mine
                )
                half += [at] if (correction, period) == ("seq_tis", 1) else []
    inside = [20 / threshold <= at <= 20 * threshold for at in half]
    tis = min(at for name, at in measured.items() if "which tis" in name)
    reason = (
        f"sequence TIS first loses half of the gain at T x KL = {', '.join(f'{at:.2g}' for at in half)}; token TIS"
        f" {f'at {tis:.2g}' if tis < math.inf else 'nowhere on the grid'}; ESS is 1/2 at"
        f" {measured['T x KL at ESS = 1/2, T = 4096']:.2g} whatever T"
    )
    return Outcome(half[0], judge(all(inside)), reason, runs, measured=measured, table=pl.DataFrame(rows))


def _phase_rows(
    problem: Problem, runs: int, steps: int, seed: int, grid: dict[int, dict[str, Sequence[float]]]
) -> list[dict]:
    """Share of the on-policy gain that token and sequence TIS lose under a discrepancy of that T x KL at the start."""
    cfg, start, rows = replace(setting("machine", seed).cfg, steps=steps, resync=EveryK(1)), np.zeros(problem.shape), []

    def final(cfg: SimConfig, first: int = 0) -> float:
        table = simulate.run(problem, start, cfg, range(first, first + runs), threads=2).table
        return float(table.filter(pl.col("step") == steps)["return"].mean())  # type: ignore[arg-type]

    on = final(cfg, first=1000)
    before = float(exact.expectation(problem, log_policy(start), problem.reward))
    cells = [
        (p, c, float(x)) for p, by_correction in grid.items() for c, values in by_correction.items() for x in values
    ]
    for period, correction, t_kl in cells:
        sd = _sd_of(problem, t_kl, seed)
        stale = replace(cfg, resync=EveryK(period), discrepancy=ConstantOffset(sd))
        lost = (on - final(replace(stale, correction=CORRECTIONS[correction]))) / (on - before)
        here = {"horizon": problem.horizon, "period": period, "correction": correction}
        rows.append(here | {"sd": sd, "t_kl": t_kl, "lost": lost})
    return rows


def _sd_of(problem: Problem, t_kl: float, seed: int) -> float:
    """Standard deviation of an offset whose T x KL(q || pi) per token at the uniform start, mean over 16 draws, is
    `t_kl`. nats"""
    logp = log_policy(np.zeros(problem.shape))
    offsets = np.random.default_rng(seed + 1).normal(size=(16, *problem.shape))

    def excess(sd: float) -> float:
        kl = exact.token_kl(problem, logp, log_policy(logp + sd * offsets))
        return problem.horizon * float(kl.mean()) - t_kl

    return float(brentq(excess, 0.0, 10.0))  # type: ignore[arg-type]
