"""Log-ratio primitives, one line of mathematics each: levels, truncation, bands, log-odds cap, centring distribution.

All take log ratios (trainer minus sampler, nats) that are already 0 at masked places (`Batch.total`, `.lag`,
`.discrepancy`), and bounds on the ratio itself, never on its inverse. An infinite cap or a zero lower bound is off.
"""

import math

from sandbox.arrays import Array, log, log_softmax, namespace
from sandbox.errors import BadInput

LEVELS = ("token", "sequence")


def at_level(log_ratio: Array, level: str) -> Array:
    """Log ratio per token, (B, T), or of the whole response (the product over its tokens), (B, 1).

    Raises BadInput for another level.
    """
    if level not in LEVELS:
        raise BadInput(f"level is {level!r}, expected one of {', '.join(LEVELS)}")
    return log_ratio if level == "token" else sequence(log_ratio)


def sequence(log_ratio: Array) -> Array:
    """log prod_t ratio_t = sum_t log ratio_t. (B, T) -> (B, 1)"""
    return namespace(log_ratio).sum(log_ratio, axis=-1, keepdims=True)


def truncate(log_ratio: Array, cap: float) -> Array:
    """min(ratio, cap), by way of min(log ratio, log cap) so that nothing overflows below an infinite cap."""
    xp = namespace(log_ratio)
    return xp.exp(xp.minimum(log_ratio, xp.full_like(log_ratio, log(cap))))


def band(log_ratio: Array, low: float, high: float) -> Array:
    """True where low <= ratio <= high, both bounds included. bool, same shape"""
    return (log_ratio >= log(low)) & (log_ratio <= log(high))


def log_odds_cap(log_ratio: Array, logp_rollout: Array, cap: float) -> Array:
    """Calibrated importance weight: truncate logit(p) - logit(q) at `cap` from above, then back to a ratio.

    sigma(logit q + min(Delta, c)) / q = min(ratio, e^c / (1 + q (e^c - 1))): the cap tightens as q grows, the
    weight is at most e^c and never above the ratio. Written with e^-c, so that cap = inf is exact.

    Args:
        log_ratio: log p - log q. (B, T)
        logp_rollout: log q, 0 where masked. (B, T)
        cap: largest admitted displacement of the log-odds, nats, >= 0.
    """
    xp = namespace(log_ratio)
    log_cap = -xp.log(math.exp(-cap) - xp.exp(logp_rollout) * math.expm1(-cap))
    return xp.exp(xp.minimum(log_ratio, log_cap))


def centring_distribution(logp_rollout_all: Array, log_lag_all: Array, cap: float) -> Array:
    """c(.|s) proportional to q(.|s) min(r(.|s), cap): what the mean score under the weighted sampler points to.

    Args:
        logp_rollout_all: log q over the vocabulary. (..., V)
        log_lag_all: log r = log pi - log mu over the vocabulary. (..., V)
        cap: truncation of the lag ratio, inf for none.
    """
    xp = namespace(logp_rollout_all)
    capped = xp.minimum(log_lag_all, xp.full_like(log_lag_all, log(cap)))
    return xp.exp(log_softmax(logp_rollout_all + capped))
