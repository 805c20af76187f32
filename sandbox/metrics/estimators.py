"""Diagnostics of a batch: effective sample size, Renyi-2, KL estimators, Pareto k, the split of the token error.

Every number here is of RAW weights unless its name says otherwise. Units: nats. "sequence" is the product over tokens.
`report` gives all of them at once.
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from sandbox.arrays import Array, count, detach, logsumexp, masked, masked_mean, namespace
from sandbox.batch import Batch
from sandbox.corrections import ratios
from sandbox.errors import BadInput


def ess(log_weight: Array) -> Array:
    """Effective sample size as a fraction of n: (sum w)^2 / (n sum w^2), in [1/n, 1] (Kish).

    Weights relative to the largest: invariant to a constant added to log w, and never clamped. Entries of
    -inf (weight 0) stay in n. nan where it is undefined: no entries, or every weight 0.

    Args:
        log_weight: raw log weights, one per unit (response or token). (..., n)
    Returns: (...)
    """
    if log_weight.shape[-1] == 0:
        xp = namespace(log_weight)
        return xp.full(log_weight.shape[:-1], xp.nan, dtype=log_weight.dtype)
    _, first, second = _moments(log_weight)
    return (first**2 / second)[..., 0]


def _moments(log_weight: Array) -> tuple[Array, Array, Array]:
    """Weights relative to the largest, their mean and the mean of their squares; nan where no weight is above 0."""
    xp = namespace(log_weight)
    top = xp.max(log_weight, axis=-1, keepdims=True)
    w = xp.exp(log_weight - detach(masked(top, xp.isfinite(top), math.nan)))
    return w, xp.mean(w, axis=-1, keepdims=True), xp.mean(w * w, axis=-1, keepdims=True)


def ess_and_influence(log_weight: Array) -> tuple[Array, Array]:
    """`ess` and the relative influence of each unit on it: u_i = 2 w_i / m1 - w_i^2 / m2 - 1, m1 and m2 the means of w
    and w^2. The u_i sum to 0.

    (..., n) -> (...), (..., n)
    """
    w, first, second = _moments(log_weight)
    return (first**2 / second)[..., 0], w * (2 / first - w / second) - 1


def ess_standard_error(log_weight: Array, group: Array) -> float:
    """Standard error of `ess` by the delta method, responses of one prompt taken as one cluster.

    With u_i of `ess_and_influence`, the relative variance of ESS is sum over groups of (sum_i u_i)^2 / n^2.
    Flattering where tails are heavy: a sample cannot see the weights it did not draw.

    Args:
        log_weight: raw sequence log weights. numpy (n,)
        group: prompt of each response. int numpy (n,)
    """
    xp = namespace(log_weight)
    value, influence = ess_and_influence(log_weight)
    per_group = xp.asarray([float(xp.sum(influence[group == g])) for g in xp.unique_values(group)])
    return float(value) * float(xp.sum(per_group**2)) ** 0.5 / log_weight.shape[0]


def ess_sums(log_weight: Array) -> Array:
    """What a rank says of its responses so that `gathered_ess` is that of all: logsumexp of log w, 2 log w, 3 log w and
    4 log w, and how many there are. The last two only serve the standard error. A rank may have none. (n,) -> (5,)
    """
    xp = namespace(log_weight)
    n = xp.full((1,), float(log_weight.shape[0]), dtype=log_weight.dtype, device=log_weight.device)
    if log_weight.shape[0] == 0:
        return xp.concat([xp.full((4,), -math.inf, dtype=log_weight.dtype, device=log_weight.device), n])
    top = xp.max(log_weight)
    top = masked(top, xp.isfinite(top))
    w = xp.exp(log_weight - top)  # one exponential for all four
    sums = xp.sum(xp.stack([w, w * w, w * w * w, w * w * w * w]), axis=-1)
    live = sums > 0
    power = xp.asarray([1.0, 2.0, 3.0, 4.0], dtype=log_weight.dtype, device=log_weight.device)
    return xp.concat([masked(xp.log(masked(sums, live, 1.0)) + power * top, live, -math.inf), n])


def gathered_ess(sums: Array) -> tuple[float, float]:
    """`ess` of the responses of all ranks together, never the mean of the ranks' own, and its standard error.

    ESS = exp(2 L1 - L2) / n with Lk the logsumexp over ranks of their k-th sum. The error is that of
    `ess_standard_error` with every response its own cluster, for a rank does not hold the other responses to a prompt.

    Args:
        sums: `ess_sums` of each rank. (R, 5)
    Returns:
        nan, nan where undefined: no response, every weight 0, an infinite one.
    """
    one, two, three, four = (float(x) for x in logsumexp(sums[:, :4], axis=0))
    n = float(namespace(sums).sum(sums[:, 4]))
    if n == 0 or not (math.isfinite(one) and math.isfinite(two)):
        return math.nan, math.nan
    fraction = math.exp(2 * one - two) / n
    mean_square = 4 / fraction + n * math.exp(four - 2 * two) - 4 * n * math.exp(three - one - two) - 1  # of u_i
    return fraction, fraction * math.sqrt(max(mean_square, 0.0) / n)


def renyi2(log_weight: Array) -> Array:
    """Sample order-2 Renyi divergence -log ESS, nats; its population value is D2(pi || q). (..., n) -> (...)"""
    return -namespace(log_weight).log(ess(log_weight))


def chi2(log_weight: Array) -> Array:
    """Sample chi-squared divergence of self-normalised weights, 1 / ESS - 1. (..., n) -> (...)

    verl's chi2 is mean(w^2) - 1 instead, which also moves with the mean weight.
    """
    return 1 / ess(log_weight) - 1


def resamples(rng: np.random.Generator, size: int, group: Array | None = None, replicates: int = 400) -> np.ndarray:
    """How often each response occurs in each bootstrap replicate, responses of one prompt drawn together.

    Args:
        size: number of responses, B.
        group: prompt of each; without it each is its own. int (B,)
    Returns: float (replicates, B)
    """
    index = np.arange(size) if group is None else np.unique(np.asarray(group), return_inverse=True)[1]
    groups = int(index.max()) + 1 if size else 0
    drawn = rng.integers(max(groups, 1), size=(replicates, groups), dtype=np.int32)
    drawn += (groups * np.arange(replicates, dtype=np.int32))[:, None]
    times = np.bincount(drawn.ravel(), minlength=replicates * groups).reshape(replicates, groups)
    return times[:, index].astype(np.float64)


def ess_interval(log_weight: Array, times: np.ndarray, level: float = 0.9) -> tuple[float, float]:
    """Percentile bootstrap interval of `ess`; (nan, nan) where undefined.

    Flattering where tails are heavy, as ESS itself is in a small sample: read it with `pareto_k`.

    Args:
        log_weight: raw log weights, one a response. (B,)
        times: `resamples`. (replicates, B)
    """
    log_weight = np.asarray(log_weight, np.float64)
    alive = np.isfinite(log_weight)
    if not alive.any():
        return math.nan, math.nan
    w = np.exp(log_weight - log_weight[alive].max())
    return bootstrap_ess(times, np.ones(len(w)), w, w**2, level)


def bootstrap_ess(
    times: np.ndarray, n: np.ndarray, once: np.ndarray, twice: np.ndarray, level: float = 0.9
) -> tuple[float, float]:
    """The same from per-response sums: how many weights, their sum, the sum of their squares. (B,) each."""
    count, first, second = (times @ np.stack([n, once, twice], axis=1)).T
    live = count * second > 0  # a draw of nothing but zero weights has no ESS
    if not live.any():
        return math.nan, math.nan
    value = np.sort(first[live] ** 2 / (count * second)[live])
    low, high = np.quantile(value, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def pareto_tail(n: int) -> int:
    """How many of n weights the Pareto fit looks at: n / 5, from 225 on 3 sqrt n, rounded down (as arviz has it)."""
    return n // 5 if n <= 225 else int(3 * math.sqrt(n))


def pareto_k(log_weight: Array, n: int | None = None) -> float:
    """Shape k of a generalised Pareto fit to the largest weights (PSIS, arXiv 1507.02646); the variance is finite for
    k < 1/2, and estimates are worthless above `pareto_k_limit`.

    -inf where the whole tail is one value (equal weights: on-policy); nan for fewer than 25 weights, a tail that
    reaches down to weights of 0 (they stay in n), or a weight that is nan or infinite.

    Args:
        log_weight: raw log weights, one a unit. (m,)
        n: how many there are, where `log_weight` holds only the largest of them, at least 5 `pareto_tail(n)`.
    """
    x = np.asarray(log_weight, np.float64)
    n = len(x) if n is None else n
    tail = pareto_tail(n)
    if tail < 5 or np.isnan(x).any() or np.isposinf(x).any():
        return math.nan
    x = np.sort(np.partition(x, len(x) - 5 * tail)[-5 * tail :])
    largest = x[-tail:]
    if np.isneginf(largest[0]):
        return math.nan
    if largest[-1] - largest[0] < 1e-12:
        return -math.inf
    from arviz_stats.base.array import array_stats  # here: importing it takes longer than the rest of the sandbox

    # arviz takes log likelihoods, the negative of log weights; so small an r_eff makes its tail a fifth of x, ours
    r_eff: Any = 1e-9
    with np.errstate(divide="ignore", invalid="ignore"):  # where most of the tail is one value
        return float(array_stats.psislw(-x, r_eff=r_eff)[1])


def pareto_k_limit(n: int) -> float:
    """min(1 - 1/log10 n, 0.7): above it n weights are too few for their mean to be trusted. nan for n < 2."""
    return min(1 - 1 / math.log10(n), 0.7) if n > 1 else math.nan


def top_share(log_weight: Array, fraction: float = 0.01) -> float:
    """Share of the total weight that the largest `fraction` of the units holds (at least one unit). nan if undefined.

    Args:
        log_weight: raw log weights. (n,)
    """
    x = np.sort(np.asarray(log_weight, np.float64))
    if not len(x) or not np.isfinite(x[-1]):
        return math.nan
    w = np.exp(x - x[-1])
    return float(w[-math.ceil(fraction * len(x)) :].sum() / w.sum())


def sequence_log_weight(batch: Batch, source: str = "total") -> Array:
    """Raw log weight of each response: the sum over its tokens of t ("total"), g ("lag") or d ("discrepancy").

    A row that is masked throughout is no response and has no weight: (n,), n <= B. Nats. Raises BadInput for another
    source.
    """
    if source not in ("total", "lag", "discrepancy"):
        raise BadInput(f"source is {source!r}, expected total, lag or discrepancy")
    xp = namespace(batch.mask)
    return detach(ratios.sequence(getattr(batch, source)))[:, 0][xp.any(batch.mask, axis=-1)]


def kl_sampler_train(batch: Batch) -> dict[str, float]:
    """Token estimators of KL(q || pi) from tokens drawn by q: k1 = -t, k2 = t^2/2, k3 = e^t - 1 - t (Schulman 2020).

    k1 and k3 are unbiased, k3 is never negative, k2 is biased. t = log pi - log q.
    """
    t = detach(batch.total)
    return {name: _token_mean(ratios.ESTIMATORS[name](t), batch) for name in ("k1", "k2", "k3")}


def _token_mean(x: Array, batch: Batch) -> float:
    """Mean over the counted tokens; nan without any."""
    return float(masked_mean(x, batch.mask)) if int(count(batch.mask)) else math.nan


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
    """Split the token error t = log pi - log q into discrepancy d and lag g; needs `logp_sync`. nan without tokens."""
    d, g = detach(batch.discrepancy), detach(batch.lag)

    def mean(x: Array) -> float:
        return _token_mean(x, batch)

    return Decomposition(mean(d * d), mean(g * g), mean((d + g) ** 2), 2 * mean(d * g))
