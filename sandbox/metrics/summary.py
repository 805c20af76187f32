"""One pass over the tokens of a batch: a few dozen sums per response, from which `report` reads everything.

Rows are taken a few at a time so that temporaries stay in the processor's cache. Ranks that concatenate their summaries
(`merge`) get the global batch's numbers, never means of means. Units: nats; log ratios are trainer minus sampler.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from sandbox.arrays import Array, count, detach, masked, namespace
from sandbox.batch import Batch, chunks
from sandbox.corrections import Corrected, ratios
from sandbox.metrics import estimators

TokenSums = Callable[..., tuple[Array, Array, Array, Array]]
PROBABILITY_EDGES = (0.01, 0.1, 0.5, 0.9)  # of q, between the bins of the per-probability profile
PROFILE_LIMIT = 100.0  # nats; profiles read a larger |log ratio| (a token that the trainer rules out) as this


@dataclass(frozen=True, eq=False)
class Summary:
    """What `report` needs of a batch.

    sums: per response, by name; extremes and counts too. float64 (B,)
    position: number of tokens, sum and sum of squares of t at token 0, 1, ... of the responses. (3, T)
    probability: the same by bins of q, PROBABILITY_EDGES between them. (3, bins)
    top: the largest token log weights: 1 %, or what the Pareto fit needs. (m,)
    split: whether d and g are known (the batch had `logp_sync`).
    weighted: whether a correction's weights were given, and per what unit: "", "token" or "sequence".
    shift: sums w and ww are of e^(t - shift), so that no ESS overflows; 0 unless it would.
    """

    sums: dict[str, np.ndarray]
    position: np.ndarray
    probability: np.ndarray
    top: np.ndarray
    split: bool
    weighted: str
    shift: float = 0.0


def summarise(
    batch: Batch, corrected: Corrected | None = None, sums_of: TokenSums | None = None, tokens: int = 65536
) -> Summary:
    """Reduce a batch (numpy or torch, detached) and, where given, the weights of a correction on it.

    Args:
        sums_of: `token_sums`, or what `torch.compile(token_sums, dynamic=False)` made of it.
        tokens: how many are looked at at once.
    """
    sums_of = sums_of or token_sums
    if batch.mask.shape[1] == 0:  # no column: the same as no row
        xp = namespace(batch.logp_train)
        none = xp.zeros((0, 1), dtype=batch.logp_train.dtype)
        batch, corrected = Batch(none, none, none > 0, none), None
    n = int(count(batch.mask))
    need = max(math.ceil(0.01 * n), 5 * estimators.pareto_tail(n))
    floor = _likely_floor(batch, need, n)
    for threshold in (floor, -math.inf):
        pieces, start = [], 0
        for piece in chunks(batch, tokens):
            stop = start + piece.mask.shape[0]
            pieces.append(_piece(piece, threshold, corrected, slice(start, stop), sums_of))
            start = stop
        if sum(len(piece.top) for piece in pieces) >= min(need, n):
            break
    whole = merge(pieces)
    shift, highest = 0.0, float(whole.sums["high"].max()) if n else 0.0
    if n and math.isfinite(highest) and not np.isfinite(whole.sums["ww"]).all():
        shift = highest
        for name, power in (("w", 1.0), ("ww", 2.0)):
            whole.sums[name] = np.concatenate([_shifted(piece, shift, power) for piece in chunks(batch, tokens)])
    largest = np.partition(whole.top, len(whole.top) - need)[-need:] if len(whole.top) > need else whole.top
    return Summary(whole.sums, whole.position, whole.probability, largest, whole.split, whole.weighted, shift)


def merge(parts: list[Summary]) -> Summary:
    """The summary of all their responses together: exact, but that `top` may miss some where one part has most of it.

    Parts may differ in T. Give `report` the prompts of all responses in the same order.
    """
    width = max(part.position.shape[1] for part in parts)
    shift = max(part.shift for part in parts)
    scaled = [
        part.sums | {name: part.sums[name] * math.exp(k * (part.shift - shift)) for name, k in (("w", 1), ("ww", 2))}
        for part in parts
    ]
    position = sum(np.pad(part.position, ((0, 0), (0, width - part.position.shape[1]))) for part in parts)
    return Summary(
        {name: np.concatenate([sums[name] for sums in scaled]) for name in scaled[0]},
        np.asarray(position),
        np.asarray(sum(part.probability for part in parts)),
        np.concatenate([part.top for part in parts]),
        all(part.split for part in parts),
        parts[0].weighted,
        shift,
    )


SUMS = ("n", "last", "t", "train", "rollout", "tt", "ttt", "tttt", "k3", "low", "high", "multiplicative", "w", "ww")
SPLIT_SUMS = ("d", "g", "dd", "gg", "dg")
WEIGHT_SUMS = ("kept", "units", "live", "a", "aa", "largest")


def token_sums(
    batch: Batch, weight: Array | None = None, keep: Array | None = None
) -> tuple[Array, Array, Array, Array]:
    """Everything that `report` reads off the tokens, as pure array code: `torch.compile` makes one pass of it.

    Args:
        weight, keep: of a correction, where its weights are reported on. (B, T) or (B, 1); bool (B, T)
    Returns:
        per response, a row for each of SUMS, SPLIT_SUMS with `logp_sync`, WEIGHT_SUMS with weights (K, B);
        n, sum and sum of squares of t by column (3, T) and by bins of q (3, bins); t itself (B, T).
    """
    xp = namespace(batch.logp_train)
    mask = batch.mask
    p, q = detach(batch.logp("logp_train")), batch.logp("logp_rollout")
    t = p - q
    square, ratio = t * t, 1 + xp.expm1(t)  # the expm1 that k3 needs too: one exponential a token when compiled
    one = xp.astype(mask, t.dtype)

    def total(x: Array) -> Array:
        return xp.sum(x, axis=-1)

    n = total(one)
    padding = t.shape[1] - n  # masked places have t = 0, so e^t = 1
    column = xp.arange(t.shape[1], dtype=t.dtype, device=t.device)
    last = xp.max(masked(column + 1 + 0 * t, mask), axis=-1)
    sums = [n, last, total(t), total(t) + total(q), total(q), total(square), total(square * t), total(square * square)]
    sums += [total(ratios.ESTIMATORS["k3"](t))]
    sums += [xp.min(masked(t, mask, math.inf), axis=-1), xp.max(masked(t, mask, -math.inf), axis=-1)]
    sums += [total(x) - padding for x in (xp.maximum(ratio, 1 / ratio), ratio, ratio * ratio)]
    if batch.logp_sync is not None:
        sync = batch.logp("logp_sync")
        d, g = sync - q, p - sync
        sums += [total(x) for x in (d, g, d * d, g * g, d * g)]
    if weight is not None and keep is not None:
        kept = mask & keep
        per_token = weight.shape[1] == mask.shape[1]
        live = kept if per_token else xp.any(kept, axis=-1, keepdims=True)
        used: Array = masked(weight, live)
        alive = xp.sum(xp.astype(live, t.dtype), axis=-1)
        units = n if per_token else xp.astype(n > 0, t.dtype)
        sums += [total(xp.astype(kept, t.dtype)), units, alive, total(used), total(used * used)]
        sums += [xp.max(used, axis=-1)]
    mild = ratios.limit(t, -PROFILE_LIMIT, PROFILE_LIMIT)
    each = (one, mild, mild * mild)
    # bins of q by differences of what lies below each edge; masked places have q = 1 and t = 0, above every edge
    below = [xp.astype(q < math.log(edge), t.dtype) for edge in PROBABILITY_EDGES]
    bins = xp.stack([xp.stack([*[xp.sum(x * b) for b in below], xp.sum(x)]) for x in each])
    probability = xp.concat([bins[:, :1], bins[:, 1:] - bins[:, :-1]], axis=1)
    return xp.stack(sums), xp.stack([xp.sum(x, axis=0) for x in each]), probability, t


def _piece(batch: Batch, threshold: float, corrected: Corrected | None, rows: slice, sums_of: TokenSums) -> Summary:
    given = () if corrected is None else (corrected.weight[rows], corrected.keep[rows])
    with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
        *results, t = sums_of(batch, *given)
    table, position, probability = (np.asarray(x, np.float64) for x in results)
    names = [*SUMS, *(SPLIT_SUMS if batch.logp_sync is not None else ()), *(WEIGHT_SUMS if given else ())]
    sums = dict(zip(names, table, strict=True))
    sums["k1"], sums["k2"] = -sums["t"], sums["tt"] / 2
    if (sums["last"] != sums["n"]).any():  # padding on the left, or holes: columns are not positions
        position = _columns(batch.mask, t)
    unit = "" if not given else ("token" if given[0].shape[1] == batch.mask.shape[1] else "sequence")
    return Summary(sums, position, probability, _above(t, batch.mask, threshold), batch.logp_sync is not None, unit)


def _shifted(batch: Batch, shift: float, power: float) -> np.ndarray:
    """sum over tokens of e^(power (t - shift)), each within float64 whatever t. (B,)"""
    xp = namespace(batch.logp_train)
    t = xp.astype(masked(detach(batch.total), batch.mask, -math.inf), xp.float64)
    return np.asarray(xp.sum(xp.exp(power * (t - shift)), axis=-1))


def _columns(mask: Array, t: Array) -> np.ndarray:
    """n, sum and sum of squares of t by position within the response, wherever its tokens stand. (3, T)"""
    xp = namespace(t)
    order = xp.argsort(xp.astype(~mask, xp.int8), axis=-1, stable=True)
    t = ratios.limit(t, -PROFILE_LIMIT, PROFILE_LIMIT)
    one, t = (xp.take_along_axis(x, order, axis=-1) for x in (xp.astype(mask, t.dtype), t))
    return np.stack([np.asarray(xp.sum(x, axis=0), np.float64) for x in (one, t, t * t)])


def _above(t: Array, mask: Array, threshold: float) -> np.ndarray:
    chosen = np.flatnonzero(np.asarray(mask & (t > threshold) if threshold > -math.inf else mask))
    return np.asarray(t).ravel()[chosen].astype(np.float64)


def _likely_floor(batch: Batch, need: int, n: int) -> float:
    """A log weight that a little more than `need` of the n tokens exceed, from one token in 64; -inf where few.

    Whole cache lines of some responses cost less than single tokens of all; a bad guess costs a second pass.
    """
    if n < 2**17:
        return -math.inf
    some = batch.rows(slice(None, None, 16))
    thin = Batch(some.logp_train[:, ::4], some.logp_rollout[:, ::4], some.mask[:, ::4], some.advantage[:, :1])
    seen = np.sort(_above(detach(thin.total), thin.mask, -math.inf))
    return float(seen[max(0, int(len(seen) * (1 - 1.3 * need / n)) - 30)]) if len(seen) else -math.inf
