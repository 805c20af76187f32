"""Diagnostics of a batch: effective sample size, Renyi-2, KL estimators, the split of the token error into d and g.

Every number here is of RAW weights unless its name says otherwise. Units: nats. "sequence" is the product over tokens.
"""

import math
from dataclasses import dataclass

from sandbox import ratios
from sandbox.arrays import Array, detach, logsumexp, masked, masked_mean, namespace
from sandbox.batch import Batch
from sandbox.errors import BadInput


def ess(log_weight: Array) -> Array:
    """Effective sample size as a fraction of n: (sum w)^2 / (n sum w^2), in [1/n, 1] (Kish).

    exp(2 logsumexp(log w) - logsumexp(2 log w)) / n: invariant to a constant added to log w, never clamped. Entries of
    -inf (weight 0) stay in n. nan where it is undefined: no entries, or every weight 0.

    Args:
        log_weight: raw log weights, one per unit (response or token). (..., n)
    Returns: (...)
    """
    xp = namespace(log_weight)
    n = log_weight.shape[-1]
    if n == 0:
        return xp.full(log_weight.shape[:-1], xp.nan, dtype=log_weight.dtype)
    once, twice = logsumexp(log_weight), logsumexp(2.0 * log_weight)
    alive = xp.isfinite(once)
    fraction = xp.exp(2.0 * masked(once, alive) - masked(twice, alive)) / n
    return masked(fraction, alive, math.nan)


def ess_influence(log_weight: Array) -> Array:
    """Relative influence of each unit on `ess`: u_i = 2 w_i / m1 - w_i^2 / m2 - 1, m1 and m2 the means of w and w^2.

    (..., n) -> (..., n); sums to 0 along n.
    """
    xp = namespace(log_weight)
    w = xp.exp(log_weight - xp.max(log_weight, axis=-1, keepdims=True))
    return 2 * w / xp.mean(w, axis=-1, keepdims=True) - w**2 / xp.mean(w**2, axis=-1, keepdims=True) - 1


def ess_standard_error(log_weight: Array, group: Array) -> float:
    """Standard error of `ess` by the delta method, responses of one prompt taken as one cluster.

    With u_i the `ess_influence`, the relative variance of ESS is sum over groups of (sum_i u_i)^2 / n^2.
    Flattering where tails are heavy: a sample cannot see the weights it did not draw.

    Args:
        log_weight: raw sequence log weights. numpy (n,)
        group: prompt of each response. int numpy (n,)
    """
    xp = namespace(log_weight)
    influence = ess_influence(log_weight)
    per_group = xp.asarray([float(xp.sum(influence[group == g])) for g in xp.unique_values(group)])
    return float(ess(log_weight)) * float(xp.sum(per_group**2)) ** 0.5 / log_weight.shape[0]


def renyi2(log_weight: Array) -> Array:
    """Sample order-2 Renyi divergence -log ESS, nats; its population value is D2(pi || q). (..., n) -> (...)"""
    return -namespace(log_weight).log(ess(log_weight))


def sequence_log_weight(batch: Batch, source: str = "total") -> Array:
    """Raw log weight of each response: the sum over its tokens of t ("total"), g ("lag") or d ("discrepancy"). (B,)"""
    if source not in ("total", "lag", "discrepancy"):
        raise BadInput(f"source is {source!r}, expected total, lag or discrepancy")
    return detach(ratios.sequence(getattr(batch, source)))[:, 0]


def kl_sampler_train(batch: Batch) -> dict[str, float]:
    """Token estimators of KL(q || pi) from tokens drawn by q: k1 = -t, k2 = t^2/2, k3 = e^t - 1 - t (Schulman 2020).

    k1 and k3 are unbiased, k3 is never negative, k2 is biased. t = log pi - log q.
    """
    xp = namespace(batch.logp_train)
    t = detach(batch.total)
    estimators = {"k1": -t, "k2": t * t / 2, "k3": xp.exp(t) - 1 - t}
    return {name: float(masked_mean(value, batch.mask)) for name, value in estimators.items()}


@dataclass(frozen=True)
class Decomposition:
    """Mean squares per token of the identity t = d + g: total = discrepancy + lag + cross_term, nats^2."""

    discrepancy: float
    lag: float
    total: float
    cross_term: float  # 2 mean(d g)

    @property
    def lag_share(self) -> float:
        """mean g^2 / (mean d^2 + mean g^2); nan where both are 0."""
        both = self.discrepancy + self.lag
        return self.lag / both if both > 0 else float("nan")


def decompose(batch: Batch) -> Decomposition:
    """Split the token error t = log pi - log q into discrepancy d and lag g; needs `logp_sync`."""
    d, g = detach(batch.discrepancy), detach(batch.lag)

    def mean(x: Array) -> float:
        return float(masked_mean(x, batch.mask))

    return Decomposition(mean(d * d), mean(g * g), mean((d + g) ** 2), 2 * mean(d * g))
