"""Log-ratio primitives, one line of mathematics each: levels, truncation, bands, estimators of KL, centring.

All take log ratios (trainer minus sampler, nats) that are already 0 at masked places (`Batch.log_ratio`), and bounds
on the ratio itself, never on its inverse. An infinite cap or a zero lower bound is off; bounds are inclusive.
"""

import math
from collections.abc import Callable

from sandbox.arrays import Array, count, detach, log, logsumexp, masked, masked_mean, namespace
from sandbox.batch import Batch
from sandbox.errors import BadInput

LEVELS = ("token", "sequence", "geometric", "prefix")


NAMES = {"total": "pi/q", "lag": "pi/mu", "discrepancy": "mu/q", "behaviour": "old/q", "drift": "pi/old"}
LEVEL_NAMES = {"token": "", "sequence": "prod ", "geometric": "geometric mean ", "prefix": "prefix prod "}


def within(what: str, low: float, high: float) -> str:
    """low <= what <= high, in words, without the bounds that are off."""
    left, right = ("" if low <= 0 else f"{low:.4g} <= "), ("" if math.isinf(high) else f" <= {high:.4g}")
    return f"{left}{what}{right}"


def name_of(on: str, level: str = "token") -> str:
    """The ratio in words: "pi/q", "prod old/q"."""
    return LEVEL_NAMES[level] + NAMES[on]


def select(batch: Batch, on: str, level: str, clamp: float = math.inf) -> Array:
    """The log ratio a rule acts on, detached: which one (`batch.SOURCES`), at which level (LEVELS), within +-clamp.

    (B, T) or (B, 1). `clamp` is the safety bound that some frameworks put on every log ratio before exp.
    """
    log_ratio = at_level(detach(batch.log_ratio(on)), level, batch.mask)
    return log_ratio if math.isinf(clamp) else limit(log_ratio, -clamp, clamp)


def at_level(log_ratio: Array, level: str, mask: Array) -> Array:
    """Log ratio per token, (B, T); of the whole response, (B, 1), or of the response so far, (B, T).

    token: r_t. sequence: prod_t r_t. geometric: (prod_t r_t)^(1/T), T the counted tokens; never called "sequence".
    prefix: prod_{u <= t} r_u. Nats. Raises BadInput for another level.
    """
    if level not in LEVELS:
        raise BadInput(f"level is {level!r}, expected one of {', '.join(LEVELS)}")
    if level == "geometric":
        return masked_mean(log_ratio, mask, axis=-1, keepdims=True)
    if level == "prefix":
        return namespace(log_ratio).cumulative_sum(log_ratio, axis=-1)
    return log_ratio if level == "token" else sequence(log_ratio)


def sequence(log_ratio: Array) -> Array:
    """log prod_t ratio_t = sum_t log ratio_t. (B, T) -> (B, 1)"""
    return namespace(log_ratio).sum(log_ratio, axis=-1, keepdims=True)


def limit(x: Array, low: float, high: float) -> Array:
    """min(max(x, low), high); an infinite limit costs nothing."""
    xp = namespace(x)
    x = x if low == -math.inf else xp.maximum(x, xp.asarray(low, dtype=x.dtype, device=x.device))
    return x if high == math.inf else xp.minimum(x, xp.asarray(high, dtype=x.dtype, device=x.device))


def truncate(log_ratio: Array, cap: float, floor: float = 0.0) -> Array:
    """min(max(ratio, floor), cap), by way of the log ratio so that nothing overflows below an infinite cap."""
    return namespace(log_ratio).exp(limit(log_ratio, log(floor), log(cap)))


def log_mean(log_weight: Array, counted: Array) -> Array:
    """log of the mean weight over the counted entries, 0 where there is none or every weight is 0. A scalar"""
    xp = namespace(log_weight)
    total = logsumexp(xp.reshape(masked(log_weight, counted, -math.inf), (-1,)))
    n = count(counted)
    n = xp.astype(xp.where(n > 0, n, xp.ones_like(n)), log_weight.dtype)
    return masked(total - xp.log(n), xp.isfinite(total))


def check_bounds(low: float, high: float, names: str) -> None:
    """Raises BadInput unless 0 <= low <= high and high > 0: bounds on a ratio, nan refused."""
    if not (0 <= low <= high and high > 0):
        raise BadInput(f"{names} are {low:g}, {high:g}, expected 0 <= low <= high and high above 0")


def band(log_ratio: Array, low: float, high: float) -> Array:
    """True where low <= ratio <= high, both bounds included; log_ratio in nats, of any shape. bool, same shape"""
    return (log_ratio >= log(low)) & (log_ratio <= log(high))


def _k3(t: Array) -> Array:
    # expm1(t) - t, which keeps its digits where t is small: exp(t) - 1 - t loses them all at t = 1e-8
    return namespace(t).expm1(t) - t


# Per token, from tokens drawn by q and t = log p - log q. k1, k2, k3 estimate KL(q || p) (Schulman 2020): k1 and k3 are
# unbiased, k3 is never negative. k3_reversed is what AReaL calls k3: unbiased for KL(p || q) only from tokens of p.
ESTIMATORS: dict[str, Callable[[Array], Array]] = {
    "k1": lambda t: -t,
    "k2": lambda t: t * t / 2,
    "k3": _k3,
    "k3_reversed": lambda t: _k3(-t),
    "multiplicative": lambda t: namespace(t).exp(namespace(t).abs(t)),  # NeMo-RL's exp|log ratio|, 1 without mismatch
}


def aggregate(x: Array, how: str, mask: Array) -> Array:
    """Per-token values as they are, (B, T), or their sum, mean or maximum over the counted tokens, (B, 1).

    Raises BadInput for another name.
    """
    xp = namespace(x)
    if how == "token":
        return x
    if how == "mean":
        return masked_mean(x, mask, axis=-1, keepdims=True)
    if how == "sum":
        return xp.sum(masked(x, mask), axis=-1, keepdims=True)
    if how == "max":
        top = xp.max(masked(x, mask, -math.inf), axis=-1, keepdims=True)
        return masked(top, xp.any(mask, axis=-1, keepdims=True))
    raise BadInput(f"aggregate is {how!r}, expected one of token, sum, mean, max")


def log_odds_limit(log_ratio: Array, logp_rollout: Array, cap: float, floor: float = -math.inf) -> Array:
    """Calibrated importance weight: keep Delta = logit(p) - logit(q) within [floor, cap], then back to a ratio.

    sigma(logit q + min(Delta, c)) / q = min(ratio, e^c / (1 + q (e^c - 1))): the cap tightens as q grows, the weight is
    at most e^c and never above the ratio; max for a floor. Written with e^-c, so that an infinite limit is exact.

    Args:
        log_ratio: log p - log q. (B, T)
        logp_rollout: log q, 0 where masked. (B, T)
        cap: largest admitted displacement of the log-odds, nats, >= 0.
        floor: smallest; -inf never raises a small weight.
    """
    xp = namespace(log_ratio)
    q = xp.exp(logp_rollout)
    weight = xp.minimum(log_ratio, -xp.log(math.exp(-cap) - q * math.expm1(-cap)))
    if floor > -math.inf:
        weight = xp.maximum(weight, floor - xp.log1p(q * math.expm1(floor)))
    return xp.exp(weight)


def centring(logp_rollout_all: Array, logp_train_all: Array, log_lag_all: Array, cap: float) -> Array:
    """Coefficients k with sum_a k(a) grad log pi(a) = sum_a c(a) grad log pi(a), c proportional to q min(r, cap).

    On the whole vocabulary k = c - pi, for sum_a pi(a) grad log pi(a) = 0. On k < V tokens (the sampler's top k)
    k = c - kappa pi, where c = q min(r, cap) / Z with the tail's ratio taken as 1, Z = sum_topk q min(r, cap) + 1 -
    sum_topk q, and c = kappa pi outside, kappa = (1 - sum_topk c) / (1 - sum_topk pi). Where nothing of pi is left
    outside, to rounding, kappa = 1: that is the whole vocabulary again. THEORY section 4.

    Args:
        logp_rollout_all, logp_train_all: log q and log pi. (..., V) or (..., k)
        log_lag_all: log r = log pi - log mu. (..., V) or (..., k)
        cap: truncation of the lag ratio, inf for none.
    """
    xp = namespace(logp_rollout_all)
    q, pi = xp.exp(logp_rollout_all), xp.exp(logp_train_all)
    weighted = xp.exp(logp_rollout_all + limit(log_lag_all, -math.inf, log(cap)))

    def tail(p: Array) -> Array:
        rest = 1.0 - xp.sum(p, axis=-1, keepdims=True)
        return masked(rest, rest > 64 * xp.finfo(p.dtype).eps)

    c = weighted / (xp.sum(weighted, axis=-1, keepdims=True) + tail(q))
    outside = tail(pi)
    left = outside > 0
    kappa = masked(tail(c) / masked(outside, left, 1.0), left, 1.0)
    return c - kappa * pi
