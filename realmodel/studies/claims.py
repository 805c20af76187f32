"""`mismatch claims --real`: the claims that a real model can test, on one study of runs from one start.

The criteria stand here before any run. The rows are those of `sandbox.experiments.claims`, so both kinds share a table.
Intervals are Student's t over seeds. A claim that needs a GPU, a mixture of experts or a longer run says so.
"""

import math
import time
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
from rich.progress import Progress
from scipy import stats

from realmodel.studies import compare, validation
from realmodel.studies.validation import KL_ALARM, Evidence
from sandbox.corrections import ratios
from sandbox.experiments.claims import Row, row_of, save
from sandbox.experiments.verdicts import EXACT, Claim, Outcome, judge
from sandbox.output import config, run_folder

LOST = 0.02  # of pass rate below on-policy: more is a failure, less is stable


def interval(x: np.ndarray) -> tuple[float, float]:
    """95 % Student interval of the mean over seeds. (n,)"""
    if not np.isfinite(x).all() or len(x) < 2:
        return EXACT
    half = float(stats.t.ppf(0.975, len(x) - 1) * x.std(ddof=1) / math.sqrt(len(x)))
    return float(x.mean() - half), float(x.mean() + half)


def _splits(seen: Evidence) -> Outcome:
    off, moved = [], []
    for steps in seen.steps["stale-none"]:
        rows = steps.drop_nulls("total")
        parts = rows["discrepancy"] + rows["lag"] + rows["cross_term"]
        off.append(float(((rows["total"] - parts).abs() / rows["total"]).max()))  # type: ignore[arg-type]
        moved.append(math.sqrt(rows.filter(pl.col("steps_since_sync") == 1)["lag"][0]))
    at_sync = max(float(steps["lag"][0]) for steps in seen.steps["stale-none"])
    good = max(off) <= 1e-4 and min(moved) > 1e-3 and at_sync == 0
    reason = f"one update later the trainer is {min(moved):.2g} nats a token (RMS) away, at the sync itself {at_sync:g}"
    return Outcome(max(off), judge(good), reason, len(off), measured={"rms_lag_one_update_later": moved})


def _constant(seen: Evidence) -> Outcome:
    ratio, grown = [], []
    for steps in seen.steps["on-policy"]:
        d = np.sqrt(steps["discrepancy"].drop_nulls().to_numpy())
        ratio.append(d[-10:].mean() / d[:10].mean())
    for steps in seen.steps["stale-none"]:
        lag = np.sqrt(steps["lag"].drop_nulls().to_numpy())
        grown.append(lag[-1] / lag[4])
    good = all(0.5 <= r <= 2 for r in ratio) and min(grown) > 2
    reason = f"RMS of d, last ten updates over the first ten: {_listed(ratio)}; of g, last over fifth: {_listed(grown)}"
    return Outcome(float(np.mean(ratio)), judge(good), reason, len(ratio), interval(np.array(ratio)))


def _loop(seen: Evidence) -> Outcome:
    at = min(20, min(len(s) for s in seen.steps["stale-tis"]) - 1)
    var = {kind: [s["probe_var_log_ratio"][at] for s in seen.steps[kind]] for kind in ("stale-none", "stale-tis")}
    ratio = np.array(var["stale-none"]) / np.array(var["stale-tis"])
    reason = f"after {at} updates the uncorrected lag's Var is {_listed(ratio)} times token TIS's, by seed"
    return Outcome(float(ratio.mean()), judge(bool((ratio > 1.5).all())), reason, len(ratio), interval(ratio))


def _weighting(seen: Evidence) -> Outcome:
    ess, failure = seen.ess_steps("fast-tis"), seen.failures("fast-tis", "fast-on-policy")
    both = np.isfinite(ess) & np.isfinite(failure)
    ratio = failure[both] / ess[both]
    reason = (
        f"token TIS at the fast rate: ess_step {_listed(ess)}, failure_step {_listed(failure)}; at the usual rate "
        f"{_listed(seen.ess_steps('stale-tis'))} and {_listed(seen.failures('stale-tis'))}, uncorrected "
        f"{_listed(seen.ess_steps('stale-none'))} and {_listed(seen.failures('stale-none'))}"
    )
    if not both.any():
        return Outcome(math.nan, "not tested", f"no run had both within its updates; {reason}", len(ess))
    good = bool(((ratio >= 0.5) & (ratio <= 2)).all() and both.all())
    return Outcome(float(ratio.mean()), judge(good), reason, len(ess), interval(ratio))


def _near(seen: Evidence) -> Outcome:
    unit = float(np.mean(seen.unit))
    units = np.array(seen.kl["dlc"]) / unit
    others = {kind: [x / unit for x in seen.kl[kind]] for kind in ("stale-none", "stale-tis")}
    reason = (
        f"DLC {_listed(units)} units of {unit:.3g} nats, pass rate {_listed(seen.lost('dlc'))} below on-policy; "
        f"never synced: uncorrected {_listed(others['stale-none'])}, token TIS {_listed(others['stale-tis'])} units"
    )
    return Outcome(float(units.mean()), judge(bool((units <= 2).all())), reason, len(units), interval(units))


def _missed(seen: Evidence) -> Outcome:
    longest = {
        kind: [compare.longest_run(s["probe_ess"].to_numpy() < 0.5) for s in seen.steps[kind]]
        for kind in ("fast-tis-ess", "fast-tis-kl", "fast-tis")
    }
    rule, alarm, never = longest.values()
    good = max(rule) <= 1 < min(alarm)
    syncs = {kind: [int(s["synced"].sum()) for s in seen.steps[kind]] for kind in ("fast-tis-ess", "fast-tis-kl")}
    lost = "; ".join(_listed(seen.lost(kind, "fast-on-policy")) for kind in longest)
    reason = (
        f"longest run of updates with probe ESS < 1/2: rule on ESS {rule} ({syncs['fast-tis-ess']} syncs), "
        f"on KL > {KL_ALARM:g} {alarm} ({syncs['fast-tis-kl']} syncs), none {never}; pass rate lost by each: {lost}"
    )
    return Outcome(float(max(rule)), judge(good), reason, len(rule))


def _calibrated(seen: Evidence, model: str = "stale") -> Outcome:
    if f"{model}-cis" not in seen.steps:
        return Outcome(math.nan, "not tested", f"the study has no runs of the kind {model}-cis", 0)
    second = []
    for run in seen.rollouts[f"{model}-none"]:
        tables = [pl.read_parquet(path) for path in sorted((run / "rollouts").glob("*.parquet"))[-10:]]
        tokens = pl.concat([t.select(pl.col("logp_train", "logp_rollout", "mask").explode()) for t in tables])
        train, rollout, mask = (tokens[name].to_numpy() for name in tokens.columns)
        kept = mask.astype(bool)
        weight = ratios.log_odds_limit((train - rollout)[kept], rollout[kept], math.log(2))
        second.append(float((weight**2).mean()))
    plain, raised = (np.array([r[-1].mean() for r in seen.rates(kind)]) for kind in (f"{model}-cis", f"{model}-raised"))
    gap = plain - raised
    low, high = interval(gap)
    good = max(second) <= 2 and low > 0
    reason = (
        f"largest E(w^2) on the stale uncorrected runs {max(second):.3f}, bound 2; raising small weights costs "
        f"{gap.mean():.4f} of pass rate ({_listed(plain)} against {_listed(raised)})"
    )
    return Outcome(float(gap.mean()), judge(good), reason, len(gap), (low, high), {"second_moment": second})


def _numerics(seen: Evidence) -> Outcome:
    on, exact = (np.array([r[-1].mean() for r in seen.rates(kind)]) for kind in ("on-policy", "exact"))
    lost = exact - on
    low, high = interval(lost)
    rms = [float(np.sqrt(s["discrepancy"].drop_nulls().to_numpy().mean())) for s in seen.steps["on-policy"]]
    reason = (
        f"bfloat16 engine (RMS of d {np.mean(rms):.2g}) against the exact one: {lost.mean():.4f} of pass rate lost; "
        f"with offsets of sd {seen.offset_sd:g} injected: {_listed(seen.lost('off-none'))} below on-policy"
    )
    return Outcome(float(lost.mean()), judge(low > LOST), reason, len(lost), (low, high))


def _bitwise(seen: Evidence) -> Outcome:
    columns = ("kl_sampler_train_k1", "kl_sampler_train_k2", "kl_sampler_train_k3", "discrepancy", "total")
    worst = max(float(s[c].drop_nulls().abs().max()) for s in seen.steps["exact"] for c in columns)  # type: ignore
    n = sum(len(s) - 1 for s in seen.steps["exact"])
    reason = f"largest of k1, k2, k3, mean d^2, mean t^2 over {n} updates: {worst:g}"
    return Outcome(worst, judge(worst == 0), reason, n)


def _sources(seen: Evidence) -> Outcome:
    verdicts, table = {}, {}
    for kind in ("stale-none", "stale-tis", "off-none", "off-tis", "off-dlc"):
        lost = seen.lost(kind)
        low, high = interval(lost)
        table[kind] = [float(lost.mean()), low, high]
        verdicts[kind] = "stable" if high < LOST else ("fails" if low > LOST else "undecided")
    pairs = [(f"stale-{c}", f"off-{c}") for c in ("none", "tis")]
    crossed = [pair for pair in pairs if {verdicts[x] for x in pair} == {"stable", "fails"}]
    told = "; ".join(f"{kind} {verdicts[kind]} ({table[kind][0]:.3f})" for kind in table)
    return Outcome(float(len(crossed)), judge(bool(crossed)), told, len(pairs), measured=table)


def _listed(values: Any) -> str:
    return ", ".join("none" if math.isinf(x) else f"{x:.3g}" for x in np.asarray(values, float))


CLAIMS = (
    Claim("C1", "The token error splits exactly into discrepancy and lag, t = d + g; a neighbouring version's"
          " snapshot does not reproduce mu.",
          "mean squares add up to 1e-4 relative, and one update after a sync the trainer is > 1e-3 nats a token away",
          0.0001, _splits),
    Claim("C2", "d stays about constant through training while g grows between syncs.",
          "RMS of d over the last ten on-policy updates within [1/2, 2] of the first ten; RMS of g more than doubles"
          " between the fifth and the last update without a sync, at every seed",
          2.0, _constant),
    Claim("C4", "Lag alone closes a loop: the uncorrected lag exceeds the corrected one from the same start.",
          "Var of the sequence log lag ratio on the probe after 20 updates > 1.5 times token TIS's at every seed",
          1.5, _loop),
    Claim("C5", "Importance weighting fails at the step where its ESS falls below one half.",
          "at the fast rate: failure_step of token TIS within a factor 2 of its ess_step at every seed",
          2.0, _weighting),
    Claim("C6", "Under a stale sampler DLC keeps KL from on-policy training within twice the on-policy pair's.",
          "KL(on-policy || DLC) <= 2 units at every seed, on the same probe prompts",
          2.0, _near),
    Claim("C7", "Resync by ESS prevents collapses that the KL on the sampler's prefixes misses.",
          "token TIS at the fast rate: with the ESS rule never two updates in a row with probe ESS < 1/2; with KL >"
          f" {KL_ALARM:g} nats a token as the rule, two or more in a row at every seed",
          1.0, _missed),
    Claim("C8", "CIS: second moment bounded by e^c; raising small weights hurts.",
          "E[w^2] <= 2 in every run, and the raised ablation's pass rate lower, 95 % interval over seeds above 0",
          0.0, _calibrated),
    Claim("C8 on a mixture of experts", "CIS: second moment bounded by e^c; raising small weights hurts.",
          "as C8",
          0.0, lambda seen: _calibrated(seen, "mixture")),
    Claim("C9", "Small token-level numerics alone, with zero lag, can collapse training, and an exact sampler does"
          " not.",
          f"bfloat16 engine more than {LOST:g} of pass rate below the exact sampler, 95 % interval over seeds above"
          " it",
          LOST, _numerics),
    Claim("C10", "An exact sampler has train-sampler KL exactly 0 at every step.",
          "all are 0.0",
          0.0, _bitwise),
    Claim("C11", "A correction that is stable under one source can fail under the other.",
          f"uncorrected or token TIS: less than {LOST:g} of pass rate lost under one source, more under the other, by"
          " their 95 % intervals over seeds",
          1.0, _sources),
)  # fmt: skip


def answer(seen: Evidence) -> list[Row]:
    """One row a claim, as `sandbox.experiments.claims.run` gives them."""
    rows = []
    for claim in CLAIMS:
        start = time.perf_counter()
        found = claim.experiment(seen)
        rows.append(row_of(claim, found, time.perf_counter() - start))
    return rows


def run(source: Path | None, folder: Path, resume: bool, bar: Progress) -> list[Row]:
    """The claims on the real model: the runs that the folder lacks, then the rows, saved as `save` does."""
    asked = validation.Study() if source is None else config.load(source, validation.Study)
    run_folder.begin_run(folder, config.resolved(asked), resume)
    task = bar.add_task(
        "starting", total=asked.start * (1 + bool(asked.mixture)) + asked.steps * len(validation.planned(asked))
    )
    validation.carry_out(asked, folder, lambda what, done: bar.update(task, description=what, advance=done))
    rows = answer(validation.evidence(asked, folder))
    save(folder, rows)
    run_folder.finish_run(folder)
    return rows
