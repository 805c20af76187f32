"""What verl, TRL, slime, prime-rl and AReaL compute, as scalar loops written from their published formulas alone.

Nothing here calls our code. Input: lists of responses, each a list of (new, old, sampler) log-probabilities per counted
token, and one advantage a response. `update` is the factor that multiplies A times the score of each token in their
policy-gradient loss (0 where masked), `mask` their mask after rejection, `metrics` what they log.
"""

import math
from typing import NamedTuple

Token = tuple[float, float, float]  # log pi now, log pi at the start of the batch, log q


class Result(NamedTuple):
    update: list[list[float]]
    mask: list[list[bool]]


def clamp(x: float, bound: float = 20.0) -> float:
    return max(-bound, min(bound, x))


def mean(values: list[float]) -> float:
    return math.fsum(values) / len(values)


def flat(rows: list[list[float]]) -> list[float]:
    return [x for row in rows for x in row]


def ppo_gradient(log_ratio: float, advantage: float, low: float = 0.2, high: float = 0.2, dual: float = math.inf):
    """d/d(log pi) of min(max(-A r, -A clip(r)), ...) over -A, by central differences of the loss itself."""

    def loss(x: float) -> float:
        r = math.exp(x)
        clipped = max(-advantage * r, -advantage * min(max(r, 1 - low), 1 + high))
        return min(-dual * advantage, clipped) if advantage < 0 and dual < math.inf else clipped

    h = 1e-6
    return -(loss(log_ratio + h) - loss(log_ratio - h)) / (2 * h) / advantage


def verl(name: str, responses: list[list[Token]], advantages: list[float]) -> Result:
    """rollout_corr_helper.py presets. decoupled: d = old - q, PPO in new - old; bypass: everything in new - q."""
    decoupled = name.startswith("decoupled")
    update, mask = [], []
    for tokens, advantage in zip(responses, advantages, strict=True):
        d = [clamp((old if decoupled else new) - q) for new, old, q in tokens]
        whole = clamp(math.fsum((old if decoupled else new) - q for new, old, q in tokens))
        if name in ("decoupled_token_is",) or name.endswith("token_tis"):
            weights = [min(math.exp(x), 2.0) for x in d]
        elif name in ("decoupled_seq_is", "decoupled_seq_is_rs", "bypass_pg_is") or name.endswith("seq_tis"):
            weights = [min(math.exp(whole), 2.0)] * len(d)
        elif name.endswith("icepop"):
            weights = [math.exp(x) if 0.5 <= math.exp(x) <= 5.0 else 0.0 for x in d]
        else:
            weights = [1.0] * len(d)
        keep = True
        if "geo_rs" in name:  # seq_mean_k1 "0.999_1.001" with k1 = -d
            keep = math.log(0.999) <= mean([-x for x in d]) <= math.log(1.001)
        if name == "decoupled_seq_is_rs":  # seq_sum_k1 "0.5_2.0"
            keep = math.log(0.5) <= math.fsum(-x for x in d) <= math.log(2.0)
        if "k3_rs" in name:  # seq_mean_k3 0.01
            keep = mean([math.exp(x) - 1 - x for x in d]) <= 0.01
        if decoupled:
            surrogate = [ppo_gradient(new - old, advantage, dual=3.0) for new, old, _ in tokens]
        elif "ppo_clip" in name:
            surrogate = [ppo_gradient(new - q, advantage, dual=3.0) for new, _, q in tokens]
        else:
            surrogate = [1.0] * len(d)
        update.append([w * s if keep else 0.0 for w, s in zip(weights, surrogate, strict=True)])
        mask.append([keep] * len(d))
    return Result(update, mask)


def verl_metrics(responses: list[list[Token]]) -> dict[str, float]:
    d = [[old - q for _, old, q in tokens] for tokens in responses]
    train = [-mean([old for _, old, _ in tokens]) for tokens in responses]
    rollout = [-mean([q for _, _, q in tokens]) for tokens in responses]
    difference = [a - b for a, b in zip(train, rollout, strict=True)]
    ratios = [math.exp(clamp(x)) for x in flat(d)]
    weights = [min(max(r, 0.0), 2.0) for r in ratios]
    gaps = [abs(math.exp(old) - math.exp(q)) for tokens in responses for _, old, q in tokens]
    return {
        "training_ppl": mean([math.exp(x) for x in train]),
        "rollout_ppl": mean([math.exp(x) for x in rollout]),
        "training_log_ppl": mean(train),
        "rollout_log_ppl": mean(rollout),
        "kl": mean([-x for x in flat(d)]),
        "k3_kl": mean([math.exp(x) - x - 1 for x in flat(d)]),
        "log_ppl_diff": mean(difference),
        "log_ppl_abs_diff": mean([abs(x) for x in difference]),
        "log_ppl_diff_max": max(difference),
        "log_ppl_diff_min": min(difference),
        "ppl_ratio": mean([math.exp(x) for x in difference]),
        "chi2_token": mean([math.exp(2 * clamp(x)) for x in flat(d)]) - 1,
        "chi2_seq": mean([math.exp(2 * clamp(math.fsum(row))) for row in d]) - 1,
        "rollout_is_mean": mean(weights),
        "rollout_is_eff_sample_size": 1 / mean([(w / (mean(weights) + 1e-8)) ** 2 for w in weights]),
        "rollout_is_ratio_fraction_high": mean([float(r > 2.0) for r in ratios]),
        "rollout_is_ratio_fraction_low": mean([float(r < 0.5) for r in ratios]),
        "rollout_probs_diff_mean": mean(gaps),
        "rollout_probs_diff_max": max(gaps),
    }


def trl_weights(name: str, responses: list[list[Token]]) -> list[list[float]]:
    """vllm_importance_sampling_mode with clip_max 3: product for sequence_*, zeros outside for *_mask; no clamp."""
    level, action = name.split("_")
    result = []
    for tokens in responses:
        d = [old - q for _, old, q in tokens]
        ratios = [math.exp(x) for x in d] if level == "token" else [math.exp(math.fsum(d))] * len(d)
        result.append([min(r, 3.0) if action == "truncate" else (r if r <= 3.0 else 0.0) for r in ratios])
    return result


def trl(name: str, responses: list[list[Token]], advantages: list[float]) -> Result:
    weights = trl_weights(name, responses)
    update = [
        [w * ppo_gradient(new - old, a) for w, (new, old, _) in zip(row, tokens, strict=True)]
        for row, tokens, a in zip(weights, responses, advantages, strict=True)
    ]
    return Result(update, [[True] * len(tokens) for tokens in responses])  # masks never change


def trl_metrics(name: str, responses: list[list[Token]]) -> dict[str, float]:
    d = [abs(old - q) for tokens in responses for _, old, q in tokens]
    weights = trl_weights(name, responses)
    values = flat(weights) if name.startswith("token") else [row[0] for row in weights]
    return {
        "sampling_logp_difference/mean": mean(d),
        "sampling_logp_difference/max": max(d),
        "importance_sampling_ratio/min": min(values),
        "importance_sampling_ratio/mean": mean(values),
        "importance_sampling_ratio/max": max(values),
    }


def slime(name: str, responses: list[list[Token]], advantages: list[float]) -> Result:
    ratios = [[math.exp(old - q) for _, old, q in tokens] for tokens in responses]
    weights = [[min(max(r, 0.0), 2.0) for r in row] for row in ratios]
    mask = [[True] * len(row) for row in ratios]
    if name == "icepop":
        weights = [[r if 0.0 <= r <= 2.0 else 0.0 for r in row] for row in ratios]
    if name == "mis":
        safe = [[min(math.exp(clamp(math.log(r))), 2.0) for r in row] for row in ratios]
        norm = mean(flat(safe))
        weights = [[w / norm for w in row] for row in safe]
        mask = [[0.5 <= r <= 2.0 and min(row) >= 1e-4 for r in row] for row in ratios]
    if name == "opsm":
        weights = [[1.0] * len(row) for row in ratios]
        for i, (tokens, a) in enumerate(zip(responses, advantages, strict=True)):
            if a < 0 and mean([old - new for new, old, _ in tokens]) > 0.1:
                mask[i] = [False] * len(tokens)
    update = [
        [w * ppo_gradient(new - old, a) if m else 0.0 for w, m, (new, old, _) in zip(row, keep, tokens, strict=True)]
        for row, keep, tokens, a in zip(weights, mask, responses, advantages, strict=True)
    ]
    return Result(update, mask)


def slime_metrics(responses: list[list[Token]]) -> dict[str, float]:
    """sum_of_sample_mean: token mean of each response, then mean over responses."""
    d = [[old - q for _, old, q in tokens] for tokens in responses]

    def by_sample(f) -> float:
        return mean([mean([f(x) for x in row]) for row in d])

    train = [-mean([old for _, old, _ in tokens]) for tokens in responses]
    rollout = [-mean([q for _, _, q in tokens]) for tokens in responses]
    difference = [a - b for a, b in zip(train, rollout, strict=True)]
    return {
        "train_rollout_logprob_abs_diff": by_sample(abs),
        "tis": by_sample(math.exp),
        "tis_abs": by_sample(lambda x: abs(math.exp(x) - 1)),
        "tis_clipfrac": by_sample(lambda x: float(math.exp(x) > 2.0)),
        "mis_kl": by_sample(lambda x: -x),
        "mis_k3_kl": by_sample(lambda x: math.exp(x) - x - 1),
        "mis_training_ppl": mean([math.exp(x) for x in train]),
        "mis_rollout_ppl": mean([math.exp(x) for x in rollout]),
        "mis_training_log_ppl": mean(train),
        "mis_rollout_log_ppl": mean(rollout),
        "mis_log_ppl_diff": mean(difference),
        "mis_log_ppl_abs_diff": mean([abs(x) for x in difference]),
        "mis_ppl_ratio": mean([math.exp(x) for x in difference]),
    }


def prime_rl(name: str, responses: list[list[Token]], advantages: list[float]) -> Result:
    """Mask by exp(new) - exp(q); gradient of A R is A R grad(new), nothing detached or clamped."""
    update, mask = [], []
    for tokens, a in zip(responses, advantages, strict=True):
        keep = []
        for new, _, q in tokens:
            diff = math.exp(new) - math.exp(q)
            drop = abs(diff) > 0.1 if name == "ipo" else (diff > 0.2 if a > 0 else diff < -0.2)
            keep.append(not drop)
        mask.append(keep)
        update.append([math.exp(new - q) if k else 0.0 for k, (new, _, q) in zip(keep, tokens, strict=True)])
    return Result(update, mask)


def prime_rl_metrics(responses: list[list[Token]], mask: list[list[bool]]) -> dict[str, float]:
    kl = [[math.exp(new - q) - 1 - (new - q) for new, _, q in tokens] for tokens in responses]

    def per_sequence(wanted) -> float:
        chosen = [[x for x, k in zip(row, keep, strict=True) if wanted(k)] for row, keep in zip(kl, mask, strict=True)]
        return mean([math.fsum(row) / max(len(row), 1) for row in chosen])

    return {
        "mismatch_kl": per_sequence(lambda k: True),
        "masked_mismatch_kl": per_sequence(lambda k: not k),
        "unmasked_mismatch_kl": per_sequence(lambda k: k),
        "is_masked": mean([mean([float(not k) for k in keep]) for keep in mask]),
    }


def areal(name: str, responses: list[list[Token]], advantages: list[float]) -> tuple[Result, list[list[float]]]:
    """apply_rejection_sampling, upper 5: not finite -> 0; sequence: filter by the product, weigh by the geometric mean.

    kl_k3 is exp(-d) - 1 + d. Also returns the behaviour weights before PPO.
    """
    update, mask, behaviour = [], [], []
    for tokens, a in zip(responses, advantages, strict=True):
        d = [old - q if math.isfinite(old - q) else 0.0 for _, old, q in tokens]
        weights = [math.exp(x) for x in d]
        keep = [True] * len(d)
        if name == "token_mask":
            keep = [w <= 5.0 for w in weights]
        elif name == "token_clamp":
            weights = [min(w, 5.0) for w in weights]
        elif name == "token_k3":
            keep = [math.exp(-x) - 1 + x <= 5.0 for x in d]
        elif name == "sequence_mask":
            keep = [math.exp(math.fsum(d)) <= 5.0] * len(d)
            weights = [math.exp(mean(d))] * len(d)
        behaviour.append(weights)
        mask.append(keep)
        surrogate = [ppo_gradient(new - (old if math.isfinite(old) else q), a) for new, old, q in tokens]
        update.append([w * s if k else 0.0 for w, s, k in zip(weights, surrogate, keep, strict=True)])
    return Result(update, mask), behaviour


def areal_metrics(responses, mask: list[list[bool]], behaviour: list[list[float]]) -> dict[str, float]:
    kept_d, kept_w, n = [], [], 0
    for tokens, keep, weights in zip(responses, mask, behaviour, strict=True):
        for (_, old, q), k, w in zip(tokens, keep, weights, strict=True):
            n += 1
            if k:
                kept_d.append(old - q if math.isfinite(old - q) else 0.0)
                kept_w.append(w)
    return {
        "behave_approx_kl": mean(kept_d),
        "behave_imp_weight": mean(kept_w),
        "rs_filtered_fraction": 1 - len(kept_d) / n,
    }
