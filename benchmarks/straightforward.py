"""The numbers of `metrics.report` as one would first write them in eager torch: whole arrays, one metric after another.

A yardstick for speed only; the benchmark checks that it agrees with ours before it compares.
"""

import math
from typing import Any

import torch
from arviz_stats.base.array import array_stats
from torch import Tensor


def masked_mean(x: Tensor, mask: Tensor) -> Tensor:
    return (x * mask).sum() / mask.sum()


def ess(w: Tensor) -> Tensor:
    return w.sum() ** 2 / (w**2).sum() / w.numel()


def interval(values: list[Tensor], of, replicates: int = 400) -> tuple[float, float]:
    """Percentile bootstrap over responses."""
    size = len(values[0])
    index = torch.randint(size, (replicates, size))
    drawn = torch.stack([of(*(v[i] for v in values)) for i in index])
    low, high = torch.quantile(drawn, torch.tensor([0.05, 0.95]))
    return float(low), float(high)


def pareto_k(log_w: Tensor) -> float:
    return float(array_stats.psislw(-log_w.double().numpy())[1])


def metrics(p: Tensor, q: Tensor, mu: Tensor, mask: Tensor, cap: float = 2.0) -> tuple[Tensor, dict[str, object]]:
    """Token TIS weights and everything in a Report. All (B, T)."""
    m = mask.float()
    p, q, mu = (torch.where(mask, x, 0.0) for x in (p, q, mu))
    t, d, g = p - q, mu - q, p - mu
    weight = torch.exp(t).clamp(max=cap) * m
    out: dict[str, object] = {}
    length = m.sum(-1)
    for name, x in (("sequence", t), ("sequence_lag", g), ("sequence_discrepancy", d)):
        s = (x * m).sum(-1)
        w = torch.exp(s - s.max())
        value = ess(w)
        out[f"ess_{name}"] = float(value)
        out[f"renyi2_{name}"] = float(-value.log())
        out[f"interval_{name}"] = interval([w], ess)
        out[f"k_{name}"] = pareto_k(s)
    ratio = torch.exp(t)
    tokens = t[mask]
    w1, w2 = (ratio * m).sum(-1), (ratio**2 * m).sum(-1)
    out["ess_token"] = float(ess(torch.exp(tokens)))
    out["interval_token"] = interval([length, w1, w2], lambda n, a, b: a.sum() ** 2 / b.sum() / n.sum())
    ordered = torch.sort(tokens).values
    largest = ordered[-math.ceil(0.01 * len(ordered)) :]
    out["top_share_token"] = float(largest.exp().sum() / tokens.exp().sum())
    tail = ordered[-5 * int(3 * math.sqrt(len(ordered))) :]
    r_eff: Any = 1e-9
    out["k_token"] = float(array_stats.psislw(-tail.double().numpy(), r_eff=r_eff)[1])
    sequence = torch.sort(torch.exp((t * m).sum(-1))).values
    out["top_share_sequence"] = float(sequence[-math.ceil(0.01 * len(sequence)) :].sum() / sequence.sum())
    kl = {"k1": -t, "k2": t**2 / 2, "k3": torch.expm1(t) - t}
    for name, x in kl.items():
        out[name] = float(masked_mean(x, m))
        out[f"{name}_by_response"] = float(((x * m).sum(-1) / length).mean())
    out["discrepancy"], out["lag"] = float(masked_mean(d**2, m)), float(masked_mean(g**2, m))
    out["total"], out["cross_term"] = float(masked_mean(t**2, m)), float(2 * masked_mean(d * g, m))
    centred = tokens - tokens.mean()
    out["kurtosis"] = float((centred**4).mean() / (centred**2).mean() ** 2 - 3)
    out["smallest"], out["largest"] = float(tokens.min().exp()), float(tokens.max().exp())
    out["multiplicative"] = float(masked_mean(torch.exp(t.abs()), m))
    out["geometric"] = float(((t * m).sum(-1) / length).abs().max())
    out["applied_ess"] = float(ess(weight[mask]))
    out["applied_mean"], out["applied_largest"] = float(masked_mean(weight, m)), float(weight.max())
    position = (torch.cumsum(m, -1) - 1).clamp(min=0)
    octave = torch.where(position < 1, 0, torch.floor(torch.log2(position.clamp(min=1))) + 1).long()
    bins = torch.bucketize(q, torch.log(torch.tensor([0.01, 0.1, 0.5, 0.9])), right=True)
    for name, index in (("position", octave), ("probability", bins)):
        n = torch.bincount(index[mask])
        for power, x in (("mean", tokens), ("square", tokens**2)):
            out[f"{name}_{power}"] = torch.bincount(index[mask], weights=x) / n
    log_train, log_rollout = -(p * m).sum(-1) / length, -(q * m).sum(-1) / length
    out["perplexity_train"], out["perplexity_rollout"] = float(log_train.exp().mean()), float(log_rollout.exp().mean())
    out["perplexity_ratio"] = float((log_train - log_rollout).exp().mean())
    return weight, out
