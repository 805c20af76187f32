"""What the log-probabilities mean, tested before any statistics: each test returns a Finding, or None.

The tests rest on identities, not on sizes. Of a token drawn from q, E[p / q] = 1 for any p that is normalised over q's
support; it is the kept mass S < 1 where q was cut (top-k, top-p), with log p - log q = log S <= 0 at every token. And
where the log-probabilities that the sampler reports are not those it drew from, it is E[q / p] that is 1.
"""

import math
from typing import Literal

import numpy as np
from scipy.optimize import minimize_scalar

from sandbox.arrays import log_softmax
from sandbox.diagnosis import alignment
from sandbox.diagnosis.alignment import FEW
from sandbox.diagnosis.evidence import Evidence, Finding, Reference, Sample, mean_and_error, same_prefix

MATERIAL = 0.01  # nats RMS; a change of meaning that moves log-probabilities by less is not told from numerics
SAME = 1e-6  # nats; two columns closer than this at nearly every token hold one thing
EXPLAINED = 0.95  # of Var d by a slope: then it is no kept mass, which knows nothing of the token drawn
ERRORS = 5.0  # standard errors of a deviation that is no chance


def findings(evidence: Evidence, ref: Reference) -> list[Finding]:
    """Everything that the table itself says is wrong, in the order in which to mend it.

    Args:
        ref: the trainer's log-probabilities to hold against the sampler's, see `evidence.reference`.
    """
    misaligned = alignment.misaligned(ref)
    found = [*alignment.refusals(evidence), greedy(evidence)]
    if not misaligned:  # else every other comparison of the two columns is of different tokens
        tempered, cut = temperature(evidence, ref), truncated_support(evidence, ref)
        if cut and not (tempered and tempered[0].evidence["explained_share_of_variance"] > EXPLAINED):
            found.append(cut)
        else:
            found += [*tempered, declared_but_absent(evidence, ref)]
    found += [*misaligned, low_precision_grid(ref)]
    found += [recomputed_old(evidence), double_correction(evidence)]
    return [finding for finding in found if finding is not None]


def greedy(evidence: Evidence) -> Finding | None:
    """Responses drawn at temperature 0: there is nothing to weight, and dividing logits by 0 is no log-probability."""
    cold = evidence.responses["temperature"] == 0
    share = float(cold.mean()) if len(cold) else 0.0
    if not share:
        return None
    message = "temperature 0 is greedy: importance ratios mean nothing; sample above 0, or leave these responses out"
    numbers = {"share_of_responses": share, "n_responses": len(cold)}
    return Finding("temperature", "error" if share > FEW else "warning", message, numbers)


def fit_temperature(logp_from: np.ndarray, logp_to: np.ndarray) -> tuple[float, float, float]:
    """T with log softmax(logp_from / T) closest to logp_to; the RMS under logp_to left by it, and by T = 1, nats.

    Args:
        logp_from, logp_to: log-probabilities, or logits, of the same tokens; of every token, or of some: tempered and
            renormalised over any set of tokens, both stay a softmax of the set's logits over T. (..., k) both
    """
    logp_to = log_softmax(np.asarray(logp_to, float))
    logp_from = np.asarray(logp_from, float)

    def misfit(log_temperature: float) -> float:
        square = (log_softmax(logp_from / math.exp(log_temperature)) - logp_to) ** 2
        return float(np.mean((np.exp(logp_to) * square).sum(-1)))

    best = minimize_scalar(misfit, bounds=(-3, 3), method="bounded", options={"xatol": 1e-8})
    return math.exp(best.x), math.sqrt(best.fun), math.sqrt(misfit(0.0))


def temperature(evidence: Evidence, ref: Reference) -> list[Finding]:
    """Trainer and sampler divide logits by different temperatures: log p = log q / T + a term of the prefix.

    T is fitted to distributions where the dump has them. Of sampled tokens alone, those drawn after one prefix share
    its term, so within prefixes the slope of log p on log q is 1 / T exactly. Where too few share one, over all
    tokens: the prefixes' term then hides some of it.
    """
    q, d = ref.tokens.rollout, ref.d
    if evidence.tops is not None and evidence.tops[0].shape[1] > 1 and len(evidence.tops[0]):
        ratio, left, before = fit_temperature(*evidence.tops)
        if abs(math.log(ratio)) < 0.02 or before < MATERIAL or left > 0.5 * before:
            return []
        numbers = {
            "temperature_ratio": ratio,
            "explained_share_of_variance": 1 - (left / before) ** 2,
            "rms_as_it_stands_nats": before,
            "rms_after_tempering_nats": left,
        }
        numbers |= {"n_places": len(evidence.tops[0]), "tokens_a_place": evidence.tops[0].shape[1]}
        return _temperature(evidence, ref, ratio, numbers)
    if len(q) < 3 or q.std() < 1e-3 or math.sqrt(np.mean(d * d)) < MATERIAL:
        return []
    x, y, freedom, groups = _within_prefixes(evidence, ref)
    within = freedom >= 30 and groups >= 8
    slope, explained, error = _line(ref, x, y) if within else (0.0, 0.0, 0.0)
    # lag makes policies sharper too, but not by a straight line; and one prompt_id may stand for several prompts
    needed = 0.99 if len(q) < 50 else 0.6 if within or ref.basis == "logp_train" else 0.4
    within &= explained >= 0.7
    if not within:
        freedom = len(q) - 1
        slope, explained, error = _line(ref, q - q.mean(), d - d.mean())
    if explained < needed or abs(slope) < 0.02 or abs(slope) < ERRORS * error or slope <= -1:
        who, means = _drawn_by(ref)
        if who != "trainer" or len(q) < 50:
            return []
        message = "the sampler reports other log-probabilities than it drew from; the trainer's are those it drew"
        message += " from: have the sampler report processed ones (vLLM: logprobs_mode processed_logprobs)"
        return [Finding("raw_logprobs", "error", message, means | {"explained_share_of_variance": explained})]
    ratio = 1 / (1 + slope)
    numbers = {
        "temperature_ratio": ratio,
        "slope_of_trainer_on_sampler": 1 + slope,
        "explained_share_of_variance": explained,
        "slope_within_prefixes": within,
        "degrees_of_freedom": freedom,
        "correlation": float(np.corrcoef(q, ref.trainer)[0, 1]),
    }
    return _temperature(evidence, ref, ratio, numbers)


def _line(ref: Reference, x: np.ndarray, y: np.ndarray) -> tuple[float, float, float]:
    """Slope of y on x, both centred; the share of y's squares it explains; its error, responses as clusters."""
    slope = float((x @ y) / (x @ x))
    _, error = mean_and_error(ref.tokens, x * (y - slope * x) / np.mean(x * x))
    return slope, float(slope**2 * (x @ x) / max(y @ y, 1e-300)), error


def _temperature(evidence: Evidence, ref: Reference, ratio: float, numbers: dict) -> list[Finding]:
    """The finding, and `raw_logprobs` where it is the sampler that does not report what it drew from."""
    declared = _one_value(evidence.responses["temperature"])
    who, means = _drawn_by(ref)
    numbers |= {"declared_temperature": declared} | means
    message = f"log p is about log q / {ratio:.2f}: the engines divide logits by different temperatures; use one"
    message += " temperature"
    found = [Finding("temperature", "error", message, numbers)]
    if not who and declared not in (None, 0.0, 1.0):
        who = "trainer" if (ratio < 1) == (declared < 1) else "sampler"  # whose temperature is the declared one
    if who == "trainer":
        message = f"the sampler reports raw log-probabilities of tokens drawn at temperature {ratio:.2f}: have it"
        message += " report processed ones (vLLM: logprobs_mode processed_logprobs)"
        found.append(Finding("raw_logprobs", "error", message, numbers))
    return found


def _drawn_by(ref: Reference) -> tuple[Literal["trainer", "sampler", ""], dict]:
    """Whose probabilities the tokens were drawn from, if the means of p / q and q / p tell: under q, E[p / q] = 1 and
    E[q / p] = 1 + chi2; under p it is the other way round."""
    (up, up_error), (down, down_error) = (mean_and_error(ref.tokens, np.expm1(s * ref.d)) for s in (1, -1))
    means = {"mean_ratio_trainer_over_sampler": 1 + up, "mean_ratio_sampler_over_trainer": 1 + down}
    means |= {"basis": ref.basis, "n_tokens": len(ref.d)}
    if up > ERRORS * up_error and abs(down) < 3 * down_error:
        return "trainer", means
    return "sampler" if down > ERRORS * down_error and abs(up) < 3 * up_error else "", means


def _within_prefixes(evidence: Evidence, ref: Reference) -> tuple[np.ndarray, np.ndarray, int, int]:
    """log q and d less their means over the tokens of one prefix; degrees of freedom; prefixes that give any."""
    key = same_prefix(evidence, ref.tokens)
    counts = np.bincount(key)
    x, y = (values - (np.bincount(key, values) / np.maximum(counts, 1))[key] for values in (ref.tokens.rollout, ref.d))
    differs = np.bincount(key, np.abs(x)) > 1e-6 * counts
    return x, y, int((counts - 1)[differs].sum()), int(differs.sum())


def _one_value(values: np.ndarray) -> float | None:
    known = values[~np.isnan(values)]
    return float(known[0]) if len(known) and (known == known[0]).all() else None


def _truncates(evidence: Evidence) -> np.ndarray:
    """Responses that were declared to be drawn with top-p below 1 or a top-k. bool (n,)"""
    return (evidence.responses["top_p"] < 1) | (evidence.responses["top_k"] > 0)


def truncated_support(evidence: Evidence, ref: Reference) -> Finding | None:
    """The sampler's probabilities are renormalised over what top-k or top-p kept, the trainer's are not: d = log S."""
    d = ref.d
    if not len(d) or (size := float(np.abs(d).mean())) == 0:
        return None
    mean = float(d.mean())
    above = float(np.maximum(d, 0).sum() / np.abs(d).sum())  # share of |d| on the wrong side
    kept, error = mean_and_error(ref.tokens, np.exp(np.minimum(d, 10.0)))
    top_p = evidence.responses["top_p"][ref.tokens.response]
    with np.errstate(divide="ignore", invalid="ignore"):
        lowest = np.where((top_p > 0) & (top_p < 1), np.log(top_p), np.nan)
    declared = ~np.isnan(lowest)
    within = bool(declared.any() and ((d >= lowest - 0.02) & (d <= 0.02))[declared].mean() >= 0.95)
    tested = len(d) >= 50 and above < 0.1 and 1 - kept > ERRORS * error
    one_mass = ref.basis != "logp_train" and len(d) >= 2 and mean < -0.02 and float(d.std()) < 0.1 * size
    if not (mean < -0.003 and above < 0.2 and (tested or within or one_mass)):
        return None
    numbers = {
        "kept_mass_mean": kept,
        "kept_mass_5_to_95": np.exp(np.quantile(d, [0.05, 0.95])).tolist(),
        "mean_log_kept_mass_nats": mean,
        "spread_of_log_kept_mass_nats": float(d.std()),
        "share_of_tokens_below_0": float((d < 0).mean()),
        "declared_top_p": _one_value(evidence.responses["top_p"]),
        "declared_top_k": _one_value(evidence.responses["top_k"]),
        "basis": ref.basis,
        "n_tokens": len(d),
    }
    message = f"truncated support: the sampler drew from a part of the vocabulary that holds {kept:.3f} of the"
    message += " probability. Renormalise the trainer over the same part (vLLM: return_sampling_mask), or sample with"
    message += " top_p 1 and no top_k. Do not subtract an average: the kept probability mass differs from prefix to"
    message += " prefix"
    return Finding("truncated_support", "error", message, numbers)


def declared_but_absent(evidence: Evidence, ref: Reference) -> Finding | None:
    """Top-p or top-k is declared, yet the engines agree: both speak of the whole vocabulary, the draw does not."""
    cut = _truncates(evidence)[ref.tokens.response]
    if cut.mean() < 0.5 if len(cut) else True:
        return None
    ratio, error = mean_and_error(ref.tokens, np.expm1(np.minimum(ref.d, 10.0)))
    if abs(ratio) > max(3 * error, 0.003):
        return None
    message = "top-p or top-k is declared, but no engine's log-probabilities show it: the ratio is not that of the"
    message += " distribution that was drawn from, unless both engines renormalised over one support"
    numbers = {"mean_ratio_trainer_over_sampler": 1 + ratio, "standard_error": error, "n_tokens": len(cut)}
    return Finding("raw_logprobs", "warning", message, numbers)


def low_precision_grid(ref: Reference) -> Finding | None:
    """A column holds only numbers that bfloat16 (or float16) can hold: its rounding is part of the discrepancy."""
    for name, values in (("logp_rollout", ref.tokens.rollout), ("the trainer's", ref.trainer)):
        values = values[values != 0]
        if len(values) < 64 or len(np.unique(values[:4096])) < 20:
            continue
        single = values.astype(np.float32)
        with np.errstate(over="ignore"):
            grids = {
                "bfloat16": (7, (single == values) & (single.view(np.uint32) & 0xFFFF == 0)),
                "float16": (10, values.astype(np.float16) == values),
            }
        for kind, (bits, on) in grids.items():
            if on.mean() < 0.99:
                continue
            step = 2.0 ** (np.floor(np.log2(np.abs(values))) - bits)
            rounding = float(np.mean(step**2) / 12)
            squares = float(np.mean(ref.d**2))
            numbers = {
                "column": name,
                "type": kind,
                "share_on_grid": float(on.mean()),
                "resolution_between_1_and_2_nats": 2.0**-bits,
                "median_resolution_nats": float(np.median(step)),
                "rms_of_rounding_nats": math.sqrt(rounding),
                "share_of_mean_square_explained": min(rounding / squares, 1.0) if squares else None,
                "n_tokens": len(values),
            }
            message = f"{name} log-probabilities lie on the {kind} grid, {2.0**-bits:.2g} apart between 1 and 2 nats:"
            message += " compute log-softmax in float32 and store float32, in both engines"
            return Finding("low_precision_grid", "warning", message, numbers)
    return None


def _share_same(a: np.ndarray, b: np.ndarray) -> float:
    return float((np.abs(a - b) <= SAME).mean()) if len(a) else 0.0


def recomputed_old(evidence: Evidence) -> Finding | None:
    """old (or logp_sync) is the trainer at its current weights although tokens are stale: it says nothing of theirs."""
    sample = evidence.sample
    stale = (sample.lag > 0) & np.isfinite(sample.train)
    for name in ("sync", "old"):
        column = getattr(sample, name)
        here = stale & np.isfinite(column)
        share = _share_same(column[here], sample.train[here])
        if share < 0.99 or _share_same(sample.train[here], sample.rollout[here]) >= 0.99:
            continue
        numbers = {"column": f"logp_{name}", "share_equal_to_logp_train": share, "n_stale_tokens": int(here.sum())}
        numbers["mean_lag_versions"] = float(sample.lag[here].mean())
        message = f"logp_{name} of stale tokens equals logp_train: it was recomputed at the current weights (or the"
        message += " learning rate is 0), which hides the lag. Record it when the sample is drawn"
        return Finding("recomputed_old", "warning", message, numbers)
    return None


def double_correction(evidence: Evidence) -> Finding | None:
    """The weight that was applied is (pi / q)^2; or would be, as old is the sampler's own column (bypass)."""
    sample: Sample = evidence.sample
    here = (sample.weight > 0) & np.isfinite(sample.train)
    t = (sample.train - sample.rollout)[here]
    if (t * t).sum() > len(t) * MATERIAL**2:
        power = float(np.log(sample.weight[here]) @ t / (t @ t))
        if abs(power - 2) < 0.1:
            message = "the applied weight is (pi / q)^2: the correction is applied twice; drop one of the two ratios"
            return Finding("double_correction", "error", message, {"power_of_ratio": power, "n_tokens": len(t)})
    here = np.isfinite(sample.old) & np.isfinite(sample.train)
    share = _share_same(sample.old[here], sample.rollout[here])
    t = sample.train[here] - sample.rollout[here]
    if share < 0.99 or math.sqrt(np.mean(t * t)) < 1e-5:
        return None
    numbers = {
        "share_old_equal_to_rollout": share,
        "rms_log_ratio_nats": math.sqrt(np.mean(t * t)),
        "rms_if_applied_twice_nats": 2 * math.sqrt(np.mean(t * t)),
        "n_tokens": int(here.sum()),
    }
    message = "logp_old is logp_rollout, so train / old is the whole ratio: use it alone. A truncated train / rollout"
    message += " beside it would correct twice"
    return Finding("double_correction", "warning", message, numbers)
