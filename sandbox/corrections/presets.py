"""Every preset by name: `PRESETS` = the core ones, more of ours, and what public frameworks run, quirks included.

A framework's preset is its whole update with one optimiser step's worth of anchors: the weight or rejection it puts on
the sampler's tokens, times the surrogate that it multiplies. Read off their sources in August 2026; "old" is
`Batch.logp_old`, so behaviour = old/q and drift = pi/old. Rejected tokens stay in the denominator ("fixed") in all of
them but verl's legacy trainer. `METRICS` are their logged numbers under their names. `table` is docs/corrections.md's.
"""

import math
from collections.abc import Callable
from dataclasses import fields, is_dataclass

from sandbox.arrays import Array, count, masked, masked_mean, namespace
from sandbox.batch import Batch, Source
from sandbox.corrections import ratios
from sandbox.corrections.combinations import Compose, FiniteOnly
from sandbox.corrections.rejections import Divergence, OffPolicySequenceMask, ProbabilityBand, Veto
from sandbox.corrections.rules import (
    CIS,
    CORRECTIONS,
    DLC,
    Centre,
    Corrected,
    Correction,
    Level,
    Mask,
    PPOClip,
    Truncate,
    Uncorrected,
)

MORE: dict[str, Correction] = {
    "geo_tis": Truncate("geometric", 2.0),
    "geo_mis": Mask("geometric", 0.99, 1.01),
    "prefix_tis": Truncate("prefix", 2.0),
    "snis": Truncate("sequence", math.inf, normalise=True),
    "ppo_dual": PPOClip(dual=3.0),
    "gspo": PPOClip(3e-4, 4e-4, level="geometric"),
    "cispo": Truncate("token", 1.2, floor=0.8),
    "dppo": Compose((Truncate("token", math.inf), ProbabilityBand())),
    "dppo_kl": Compose((Truncate("token", math.inf), ProbabilityBand(0.05, 0.05, "kl"))),
    "opsm": OffPolicySequenceMask(),
    "cis_raised": CIS(floor=-math.log(2.0)),
    "seq_dlc": DLC("sequence"),
}

# verl: +-20 on every log ratio; k1 = log q - log pi, so that its bounds "lo_hi" are on q/pi and keep [1/hi, 1/lo] here.
V_TOKEN = Truncate("token", 2.0, "behaviour", clamp=20.0)
V_SEQ = Truncate("sequence", 2.0, "behaviour", clamp=20.0)
V_PPO = PPOClip(dual=3.0, on="drift")
V_BYPASS = PPOClip(dual=3.0)


def verl_k1(level: Level, low: float, high: float, on: Source = "behaviour") -> Mask:
    """verl's rollout_rs with k1: keep where low <= q/pi <= high, whatever its documents call the bounds."""
    return Mask(level, 1 / high, 1 / low, on, weigh=False)


def verl_k3(limit: float = 0.01, on: Source = "behaviour") -> Divergence:
    """verl's rollout_rs = "seq_mean_k3"."""
    return Divergence("k3", "mean", limit, on, clamp=20.0)


VERL: dict[str, Correction] = {
    "verl.decoupled_token_is": Compose((V_TOKEN, V_PPO)),
    "verl.decoupled_seq_is": Compose((V_SEQ, V_PPO)),
    "verl.decoupled_token_icepop": Compose((Mask("token", 0.5, 5.0, "behaviour", 20.0, drop=False), V_PPO)),
    "verl.decoupled_seq_is_rs": Compose((V_SEQ, verl_k1("sequence", 0.5, 2.0), V_PPO)),
    "verl.decoupled_geo_rs": Compose((verl_k1("geometric", 0.999, 1.001), V_PPO)),
    "verl.decoupled_geo_rs_seq_tis": Compose((V_SEQ, verl_k1("geometric", 0.999, 1.001), V_PPO)),
    "verl.decoupled_geo_rs_token_tis": Compose((V_TOKEN, verl_k1("geometric", 0.999, 1.001), V_PPO)),
    "verl.decoupled_k3_rs": Compose((verl_k3(), V_PPO)),
    "verl.decoupled_k3_rs_seq_tis": Compose((V_SEQ, verl_k3(), V_PPO)),
    "verl.decoupled_k3_rs_token_tis": Compose((V_TOKEN, verl_k3(), V_PPO)),
    "verl.bypass_ppo_clip": V_BYPASS,
    "verl.bypass_ppo_clip_geo_rs": Compose((verl_k1("geometric", 0.999, 1.001, "total"), V_BYPASS)),
    "verl.bypass_ppo_clip_k3_rs": Compose((verl_k3(on="total"), V_BYPASS)),
    "verl.bypass_pg_is": Truncate("sequence", 2.0, clamp=20.0),
    "verl.bypass_pg_token_icepop": Mask("token", 0.5, 5.0, clamp=20.0, drop=False),
    "verl.bypass_pg_geo_rs": verl_k1("geometric", 0.999, 1.001, "total"),
    "verl.bypass_pg_geo_rs_seq_tis": Compose(
        (Truncate("sequence", 2.0, clamp=20.0), verl_k1("geometric", 0.999, 1.001, "total"))
    ),
    "verl.bypass_pg_geo_rs_token_tis": Compose(
        (Truncate("token", 2.0, clamp=20.0), verl_k1("geometric", 0.999, 1.001, "total"))
    ),
}

# TRL: default mode sequence_mask with clip_max 3, whatever the docstring says of token_truncate. No clamp.
D_PPO = PPOClip(on="drift")
TRL: dict[str, Correction] = {
    "trl.token_truncate": Compose((Truncate("token", 3.0, "behaviour"), D_PPO)),
    "trl.token_mask": Compose((Mask("token", 0.0, 3.0, "behaviour", drop=False), D_PPO)),
    "trl.sequence_truncate": Compose((Truncate("sequence", 3.0, "behaviour"), D_PPO)),
    "trl.sequence_mask": Compose((Mask("sequence", 0.0, 3.0, "behaviour", drop=False), D_PPO)),
}

# slime: mis is its shipped yaml: truncated token weights over their batch mean, rejection band, veto below 1e-4.
SLIME: dict[str, Correction] = {
    "slime.tis": Compose((Truncate("token", 2.0, "behaviour"), D_PPO)),
    "slime.icepop": Compose((Mask("token", 0.0, 2.0, "behaviour", drop=False), D_PPO)),
    "slime.mis": Compose(
        (
            Truncate("token", 2.0, "behaviour", clamp=20.0, normalise=True),
            Mask("token", 0.5, 2.0, "behaviour", weigh=False),
            Veto(1e-4, on="behaviour"),
            D_PPO,
        )
    ),
    "slime.opsm": Compose((OffPolicySequenceMask(0.1, "drift"), D_PPO)),
}

# prime-rl: the ratio is not detached and nothing is clamped, which is weight pi/q; the loss adds
# `losses.squared_mismatch(tau=1e-3)` over all tokens, rejected ones included.
PRIME_RL: dict[str, Correction] = {
    "prime_rl.default": Compose((Truncate("token", math.inf), ProbabilityBand(0.2, 0.2))),
    "prime_rl.ipo": Compose((Truncate("token", math.inf), ProbabilityBand(0.1, 0.1, both_ways=True))),
}

# AReaL: a log ratio that is not finite counts as 0; its k3 is that of KL(old || q); sequences are filtered by the
# product and weighed by the geometric mean.
AREAL: dict[str, Correction] = {
    "areal.token_mask": FiniteOnly(Compose((Mask("token", 0.0, 5.0, "behaviour"), D_PPO))),
    "areal.token_clamp": FiniteOnly(Compose((Truncate("token", 5.0, "behaviour"), D_PPO))),
    "areal.sequence_mask": FiniteOnly(
        Compose(
            (Truncate("geometric", math.inf, "behaviour"), Mask("sequence", 0.0, 5.0, "behaviour", weigh=False), D_PPO)
        )
    ),
    "areal.token_k3": FiniteOnly(
        Compose(
            (
                Truncate("token", math.inf, "behaviour"),
                Divergence("k3_reversed", "token", 5.0, "behaviour"),
                D_PPO,
            )
        )
    ),
}

FRAMEWORKS: dict[str, Correction] = VERL | TRL | SLIME | PRIME_RL | AREAL
PRESETS: dict[str, Correction] = CORRECTIONS | MORE | FRAMEWORKS

# The rules themselves, under their class names: a place to start from in a TOML, {preset = "Truncate", on = "lag"}.
RULES: dict[str, Correction] = {
    type(rule).__name__: rule
    for rule in (
        *(Uncorrected(), Truncate(), Mask(), PPOClip(), CIS(), Centre(), DLC(), Compose(), FiniteOnly()),
        *(Veto(), Divergence(), ProbabilityBand(), OffPolicySequenceMask()),
    )
}


SOURCES = {
    "verl": "verl 1dda039b",
    "trl": "TRL f2cd5771",
    "slime": "slime 624b824a",
    "prime_rl": "prime-rl 559b4477",
    "areal": "AReaL 4aef98d8",
    "cispo": "MiniMax, arXiv 2506.13585",
    "gspo": "arXiv 2507.18071",
    "ppo_dual": "arXiv 1912.09729",
    "dppo": "arXiv 2602.04879",
    "dppo_kl": "arXiv 2602.04879",
    "icepop": "arXiv 2510.18855",
    "geo_tis": "slime",
    "prefix_tis": "arXiv 2605.07331",
    "snis": "textbook",
}


def written(rule: object) -> str:
    """A rule as Python, fields at their defaults left out: `Truncate(level='sequence', cap=inf)`."""
    if isinstance(rule, tuple):
        return f"({', '.join(map(written, rule))}{',' if len(rule) == 1 else ''})"
    if not is_dataclass(rule):
        return repr(rule)
    changed = [(f.name, getattr(rule, f.name)) for f in fields(rule) if getattr(rule, f.name) != f.default]
    return f"{type(rule).__name__}({', '.join(f'{name}={written(value)}' for name, value in changed)})"


def table() -> str:
    """Markdown table of every preset; docs/corrections.md holds it between its markers, and a test compares them."""
    lines = ["| name | weight x mask | as a rule | source |", "|---|---|---|---|"]
    for name, rule in PRESETS.items():
        source = SOURCES.get(name) or SOURCES.get(name.partition(".")[0]) or getattr(rule, "source", "")
        lines.append(f"| `{name}` | {rule} | `{written(rule)}` | {source} |")
    return "\n".join(lines)


def _by_response(x: Array, mask: Array) -> Array:
    """Mean over responses of the mean over a response's tokens, slime's and prime-rl's default reduction. Scalar"""
    xp = namespace(x)
    return masked_mean(masked_mean(x, mask, axis=-1, keepdims=True), xp.any(mask, axis=-1, keepdims=True))


def _perplexities(batch: Batch) -> dict[str, Array]:
    """Per response, (B, 1): log perplexity of trainer (old) and sampler, and their difference, trainer first."""
    trainer, sampler = (
        -masked_mean(batch.logp(f), batch.mask, axis=-1, keepdims=True) for f in ("logp_old", "logp_rollout")
    )
    xp = namespace(trainer)
    return {
        "training_ppl": xp.exp(trainer),
        "rollout_ppl": xp.exp(sampler),
        "training_log_ppl": trainer,
        "rollout_log_ppl": sampler,
        "log_ppl_diff": trainer - sampler,
        "log_ppl_abs_diff": xp.abs(trainer - sampler),
        "ppl_ratio": xp.exp(trainer - sampler),
    }


def verl_metrics(batch: Batch, cap: float = 2.0) -> dict[str, Array]:
    """verl's rollout_corr/: kl is k1 with its sign, k3 unclamped, chi2 clamped at 20, ESS of the truncated tokens.

    Scalars, nats where it is a KL.
    """
    xp = namespace(batch.logp_rollout)
    d, has = batch.log_ratio("behaviour"), xp.any(batch.mask, axis=-1, keepdims=True)
    clamped, whole = ratios.limit(d, -20.0, 20.0), ratios.limit(ratios.sequence(d), -20.0, 20.0)
    weight = masked(ratios.truncate(clamped, cap), batch.mask)
    mean = masked_mean(weight, batch.mask)
    difference = _perplexities(batch)["log_ppl_diff"]
    p, q = xp.exp(batch.logp("logp_old")), xp.exp(batch.logp("logp_rollout"))
    return {name: masked_mean(value, has) for name, value in _perplexities(batch).items()} | {
        "log_ppl_diff_max": xp.max(masked(difference, has, -math.inf)),
        "log_ppl_diff_min": xp.min(masked(difference, has, math.inf)),
        "kl": masked_mean(-d, batch.mask),
        "k3_kl": masked_mean(ratios.ESTIMATORS["k3"](d), batch.mask),
        "chi2_token": masked_mean(xp.exp(2 * clamped), batch.mask) - 1,
        "chi2_seq": masked_mean(xp.exp(2 * whole), has) - 1,
        "rollout_is_mean": mean,
        "rollout_is_eff_sample_size": 1 / masked_mean((weight / (mean + 1e-8)) ** 2, batch.mask),
        "rollout_is_ratio_fraction_high": masked_mean(xp.astype(xp.exp(clamped) > cap, d.dtype), batch.mask),
        "rollout_is_ratio_fraction_low": masked_mean(xp.astype(xp.exp(clamped) < 1 / cap, d.dtype), batch.mask),
        "rollout_probs_diff_mean": masked_mean(xp.abs(p - q), batch.mask),
        "rollout_probs_diff_max": xp.max(masked(xp.abs(p - q), batch.mask)),
    }


def trl_metrics(batch: Batch, corrected: Corrected) -> dict[str, Array]:
    """TRL's sampling/: |log difference|, and min, mean and max of the weights after the clip, masked zeros included.

    Args:
        corrected: of the importance sampling rule alone, without the PPO clip. (B, T) or (B, 1)
    """
    xp = namespace(batch.logp_rollout)
    d = xp.abs(batch.log_ratio("behaviour"))
    weight = corrected.weight
    counted = batch.mask if weight.shape == batch.mask.shape else xp.any(batch.mask, axis=-1, keepdims=True)
    return {
        "sampling_logp_difference/mean": masked_mean(d, batch.mask),
        "sampling_logp_difference/max": xp.max(d),
        "importance_sampling_ratio/min": xp.min(masked(weight, counted, math.inf)),
        "importance_sampling_ratio/mean": masked_mean(weight, counted),
        "importance_sampling_ratio/max": xp.max(masked(weight, counted)),
    }


def slime_metrics(batch: Batch, cap: float = 2.0) -> dict[str, Array]:
    """slime's: every number a mean over responses of token means; tis is the raw ratio.

    Scalars, nats where it is a KL.
    """
    xp = namespace(batch.logp_rollout)
    d = batch.log_ratio("behaviour")
    ratio = xp.exp(d)
    per_token = {
        "train_rollout_logprob_abs_diff": xp.abs(d),
        "tis": ratio,
        "tis_abs": xp.abs(ratio - 1),
        "tis_clipfrac": xp.astype(ratio > cap, d.dtype),
        "mis_kl": -d,
        "mis_k3_kl": ratios.ESTIMATORS["k3"](d),
    }
    has = xp.any(batch.mask, axis=-1, keepdims=True)
    per_response = {f"mis_{name}": masked_mean(value, has) for name, value in _perplexities(batch).items()}
    return {name: _by_response(value, batch.mask) for name, value in per_token.items()} | per_response


def prime_rl_metrics(batch: Batch, corrected: Corrected) -> dict[str, Array]:
    """prime-rl's: k3 of the current weights per response over all, dropped and kept tokens; share dropped.

    Scalars, nats where it is a KL.
    """
    kl = ratios.ESTIMATORS["k3"](batch.total)
    xp = namespace(kl)
    rejected, kept = batch.mask & ~corrected.keep, batch.mask & corrected.keep
    has = xp.any(batch.mask, axis=-1, keepdims=True)

    def mean(mask: Array) -> Array:
        return masked_mean(masked_mean(kl, mask, axis=-1, keepdims=True), has)

    return {
        "mismatch_kl": mean(batch.mask),
        "masked_mismatch_kl": mean(rejected),
        "unmasked_mismatch_kl": mean(kept),
        "is_masked": _by_response(xp.astype(rejected, kl.dtype), batch.mask),
    }


def areal_metrics(batch: Batch, corrected: Corrected) -> dict[str, Array]:
    """AReaL's: behave_approx_kl is +d (minus verl's kl); the mean weight is that of the kept tokens.

    Scalars, nats where it is a KL.
    """
    xp = namespace(batch.logp_rollout)
    d = batch.log_ratio("behaviour")
    d = masked(d, xp.isfinite(d))
    kept = batch.mask & corrected.keep
    return {
        "behave_approx_kl": masked_mean(d, kept),
        "behave_imp_weight": masked_mean(corrected.weight * xp.ones_like(d), kept),
        "rs_filtered_fraction": 1 - count(kept) / xp.maximum(count(batch.mask), xp.ones_like(count(kept))),
    }


METRICS: dict[str, Callable[..., dict[str, Array]]] = {
    "verl": verl_metrics,
    "trl": trl_metrics,
    "slime": slime_metrics,
    "prime_rl": prime_rl_metrics,
    "areal": areal_metrics,
}


if __name__ == "__main__":  # python -m sandbox.corrections.presets: what belongs between the markers
    print(table())
