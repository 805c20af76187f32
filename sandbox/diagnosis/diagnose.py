"""`mismatch diagnose`: what a dump of rollouts says of its run, as one dict; semantics first, then statistics.

verdict, by precedence: semantics, hidden_staleness, not_identifiable, prediction_failed, healthy, then lag or numerics.
"""

import math
from collections.abc import Iterable
from typing import Any

from sandbox.diagnosis import attribution, drift, judgement, ranking, semantics
from sandbox.diagnosis.evidence import SAMPLE_TOKENS, Evidence, Finding, collect, reference
from sandbox.diagnosis.rollouts import Chunk
from sandbox.errors import BadInput

HEALTHY_K3 = 5e-4
UNITS = {
    "discrepancy": "mean of (log mu - log q)^2 over tokens, nats^2",
    "lag": "mean of (log pi - log mu)^2 over tokens, nats^2",
    "total": "mean of (log pi - log q)^2 over tokens, nats^2",
    "cross_term": "2 mean of (log mu - log q)(log pi - log mu), nats^2: total = discrepancy + lag + cross_term",
    "ess": "fraction of n; weights raw (truncated: where it says so), trainer over sampler, product over a response",
    "kl_sampler_train": "nats per token, KL(q || pi) from tokens drawn by q, mean over tokens",
}


def diagnose(chunks: Iterable[Chunk], sample_tokens: int = SAMPLE_TOKENS) -> dict[str, Any]:
    """Everything that `mismatch diagnose --json` prints, see DESIGN; nan where a number is not identifiable.

    Args:
        chunks: of `readers.read`, or of `refusals.check`.
        sample_tokens: how many tokens are kept for what sums cannot say.
    Raises BadInput: not one response can be used.
    """
    return outcome(collect(chunks, sample_tokens))


def outcome(evidence: Evidence) -> dict[str, Any]:
    """`diagnose` of a dump that is already reduced. Raises BadInput where it has no row."""
    if not evidence.n_rows:
        raise BadInput("the dump holds no row")
    recomputed = semantics.recomputed_old(evidence)
    resynced = recomputed is None or recomputed.evidence["column"] != "logp_sync"
    ref = reference(evidence, resynced)
    split = attribution.split(evidence, resynced)
    staleness, of_versions = attribution.versions(evidence)
    budget, clip = attribution.clip_budget(ref)
    findings = [*semantics.findings(evidence, ref), *of_versions]
    profile: dict = {}
    unlike = ("shift", "retokenised", "temperature", "truncated_support")  # columns of unlike things
    if not any(f.severity == "error" and f.code in unlike for f in findings):
        profile, drifting = drift.drift(evidence, ref)
        findings += [*drifting, *(f for f in (attribution.mixture_tail(ref), clip) if f is not None)]
    sizes = judgement.ess(evidence, resynced)
    steps = judgement.by_step(evidence, resynced)
    failed = judgement.prediction_failed(steps)
    findings += [*judgement.alarms(evidence, sizes), *([failed] if failed else [])]
    findings += [f for f in (_discarded(evidence), _zeros(evidence)) if f is not None]
    r = evidence.responses
    alive = float(r["n"].sum() - r["zeros"].sum())
    kl = {"k1": float(r["k1"].sum()), "k2": float(r["tt"].sum()) / 2, "k3": float(r["k3"].sum())}
    kl = {name: value / alive if alive else math.nan for name, value in kl.items()}
    verdict = _verdict(findings, split, kl["k3"], sizes["sequence"]["raw"], evidence)
    prediction = judgement.collapse_prediction(evidence, resynced)
    ranked = ranking.rank_corrections(evidence, resynced) if verdict != "semantics" else []
    levels = judgement.reference_levels(ref)
    return {
        "verdict": verdict,
        "findings": [f.__dict__ for f in findings],
        "refused": [
            {"sample_id": one.sample_id, "reason": one.reason, "tokens": one.tokens, "whole": one.whole}
            | ({"detail": one.detail} if one.detail else {})
            for one in evidence.refused
        ],
        "n_rows": evidence.n_rows,
        "n_responses": len(r["n"]),
        "n_tokens": evidence.n_tokens,
        "discrepancy": split.discrepancy,
        "lag": split.lag,
        "total": split.total,
        "cross_term": split.cross_term,
        "lag_share": split.lag_share,
        "identified_by": split.method,
        "n_tokens_split": split.n_tokens,
        "by_lag": attribution.lag_table(evidence, split.discrepancy),
        "staleness": staleness,
        "clip_budget": budget,
        "constancy": profile,
        "ess": sizes,
        "kl_sampler_train": kl,
        "by_step": steps,
        "collapse_prediction": prediction,
        "corrections": ranked,
        "reference_levels": levels,
        "advice": advice(verdict, findings, split, prediction, ranked, levels, sizes),
        "units": UNITS,
    }


def _verdict(findings: list[Finding], split: attribution.Split, k3: float, ess: float, evidence: Evidence) -> str:
    errors = {finding.code for finding in findings if finding.severity == "error"}
    if errors - {"hidden_staleness", "prediction_failed"} or not evidence.n_tokens:
        return "semantics"
    if "hidden_staleness" in errors:
        return "hidden_staleness"
    if split.method == "none":
        return "not_identifiable"
    if "prediction_failed" in errors:
        return "prediction_failed"
    if k3 < HEALTHY_K3 and ess >= judgement.HEALTHY_ESS:
        return "healthy"
    return "lag" if split.lag_share >= 0.5 else "numerics"


def _discarded(evidence: Evidence) -> Finding | None:
    """Responses masked throughout (dropped as too stale, too long): whether they are of another length."""
    if not len(evidence.empty):
        return None
    kept = float(evidence.responses["length"].mean()) if len(evidence.responses["n"]) else math.nan
    n = len(evidence.empty) + len(evidence.responses["n"])
    dropped, share = float(evidence.empty.mean()), len(evidence.empty) / n
    numbers = {"share_of_responses": share, "mean_length_dropped": dropped, "mean_length_kept": kept, "n_responses": n}
    biased = share > semantics.FEW and abs(math.log((dropped + 1) / (kept + 1))) > math.log(1.25)
    message = f"{len(evidence.empty)} responses are masked throughout and count nowhere (n, ESS, chi2)"
    if biased:
        message += f"; they have {dropped:.0f} tokens on average, the kept ones {kept:.0f}: dropping them favours"
        message += f" {'short' if dropped > kept else 'long'} responses"
    return Finding("discarded_responses", "warning" if biased else "info", message, numbers)


def _zeros(evidence: Evidence) -> Finding | None:
    zeros = int(evidence.responses["zeros"].sum())
    if not zeros:
        return None
    message = f"{zeros} drawn tokens have probability 0 under the trainer: their responses have weight 0 and stay in n."
    message += " Mean squares and KL leave those tokens out"
    return Finding("zero_probability", "warning", message, {"tokens": zeros, "n_tokens": evidence.n_tokens})


def advice(
    verdict: str,
    findings: list[Finding],
    split: attribution.Split,
    prediction: dict,
    ranked: list[dict],
    levels: dict,
    sizes: dict,
) -> list[str]:
    """What to do, most important first; a person stops reading after three."""
    said = [finding.message for finding in findings if finding.severity == "error"]
    if verdict == "semantics":
        return [
            *said,
            "Mend this first: the ratios compare unlike things. Until then do not correct them and do not read the KL.",
        ]
    if verdict == "not_identifiable":
        said.append(
            "Numerics and lag cannot be told apart: record logp_sync (the trainer at the sampler's weights), or"
            " keep some responses of lag 0 with their versions. --lag 0 states that there was none."
        )
    if verdict == "numerics":
        said.append(
            "Numerics: compare the engines at one set of weights. Use float32 for log-softmax and lm_head on both sides"
            " (on one side alone the difference grows). Then correct the discrepancy."
        )
    if verdict == "lag":
        said.append("Lag: sync more often, or lower the learning rate. The engines differ less than the weights do.")
    period = prediction["sync_period"]
    if math.isfinite(period):
        said.append(
            f"By the run's own curve the sequence ESS of the lag passes 1/2 after {prediction['ess_step']:.0f} updates"
            f" (90 %: {_count(prediction['interval'][0])} to {_count(prediction['interval'][1])}): sync every"
            f" {period:.0f} or fewer."
        )
    if verdict == "healthy":
        said.append("Healthy: no correction is needed; keep watching the sequence ESS, not the KL per token.")
    elif ranked:
        best = ranked[0]
        said.append(
            f"Of the corrections, {best['correction']} has the least simulated error on these ratios,"
            f" {best['error']:.2g} times that of {best['responses_per_step']:.0f} fresh responses"
            f" (bias {best['bias']:.2g}, noise {best['noise']:.2g})."
        )
    after = sizes.get("sequence_after_mean")
    codes = {finding.code for finding in findings}
    constant = not codes & {"mixture_tail", "discrepancy_not_constant"}
    if after and constant and after["raw"] > sizes["sequence"]["raw"] + 0.1:
        said.append(
            f"A constant offset of {after['mean_nats']:.2g} nats a token adds up over a response: without it the"
            f" sequence ESS would be {after['raw']:.2f}, not {sizes['sequence']['raw']:.2f}."
        )
    if levels["group"] is not None:
        said.append(
            f"k3 of {levels['k3']:.2g} nats a token ({levels['basis']}): {levels['dense']} what is reported of dense"
            f" models (1e-5 to 1e-3), {levels['moe']} what is reported of MoE (1e-3 to 0.1)."
        )
    return said


def _count(x: float) -> str:
    return f"{x:.0f}" if math.isfinite(x) else "never"
