"""Batch: the log-probabilities of one batch of responses under every policy that had a say in it.

Names (THEORY, who is who): pi = trainer now (`logp_train`), mu = trainer's engine at the sampler's weights
(`logp_sync`), q = what the sampler drew from (`logp_rollout`). Per token: discrepancy d = log mu - log q, lag
g = log pi - log mu, total t = log pi - log q = d + g. Log ratios are always trainer minus sampler, in nats.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any, Literal

import numpy as np

from sandbox.arrays import Array, detach, masked, namespace, widen
from sandbox.errors import BadInput

Source = Literal["total", "lag", "discrepancy", "behaviour", "drift"]

# The log ratios there are, numerator and denominator. Frameworks' "old" is `logp_old`: they call behaviour d, drift u.
SOURCES: dict[str, tuple[str, str]] = {
    "total": ("logp_train", "logp_rollout"),  # t = log pi - log q
    "lag": ("logp_train", "logp_sync"),  # g = log pi - log mu
    "discrepancy": ("logp_sync", "logp_rollout"),  # d = log mu - log q
    "behaviour": ("logp_old", "logp_rollout"),  # t at the start of the batch
    "drift": ("logp_train", "logp_old"),  # what the updates on this batch have added
}
LOGP_TOLERANCE = 1e-5  # a log-probability may exceed 0 by rounding, not by more
SUM_TOLERANCE = 0.01  # nats; a table that is not normalised (logits, another temperature) is off by more


@dataclass(frozen=True, eq=False)
class Batch:
    """B responses of up to T tokens over a vocabulary of V; numpy arrays or torch tensors.

    Args:
        logp_train: log pi of the drawn tokens, nats; the only field that carries a gradient. (B, T)
        logp_rollout: log q of the drawn tokens, as the sampler reported them. (B, T)
        mask: True where a token counts; anything, nan included, may stand in the other places. bool (B, T)
        advantage: advantage of each response or token. (B, 1) or (B, T)
        logp_sync: log mu of the drawn tokens. Without it d and g are not identifiable. (B, T)
        logp_old: log-probabilities of the trainer at the start of the batch, the anchor of PPO-like rules; without it
            `logp_train` without its gradient, which is right for the first update on a batch. (B, T)
        logp_train_all, logp_sync_all, logp_rollout_all: the same three over the whole vocabulary, or over the
            same k tokens each (the sampler's top k), for corrections that centre the score. (B, T, V) or (B, T, k)
        version_rollout: weight version that drew each response or token. int (B, 1) or (B, T)
        version_train: weight version that consumes the batch.
    """

    logp_train: Array
    logp_rollout: Array
    mask: Array
    advantage: Array
    logp_sync: Array | None = None
    logp_old: Array | None = None
    logp_train_all: Array | None = None
    logp_sync_all: Array | None = None
    logp_rollout_all: Array | None = None
    version_rollout: Array | None = None
    version_train: int | None = None

    def logp(self, field: str) -> Array:
        """The named log-probabilities, 0 where masked, float64 (numpy) or at least float32 (torch). (B, T)"""
        return masked(widen(self.need(field)), self.mask)

    def log_ratio(self, on: str) -> Array:
        """Trainer minus sampler per token, one of SOURCES, 0 where masked. (B, T)  Raises BadInput for another."""
        if on not in SOURCES:
            raise BadInput(f"log ratio is {on!r}, expected one of {', '.join(SOURCES)}")
        numerator, denominator = SOURCES[on]
        return self.logp(numerator) - self.logp(denominator)

    @property
    def total(self) -> Array:
        """t = log pi - log q per token, 0 where masked. (B, T)"""
        return self.log_ratio("total")

    @property
    def lag(self) -> Array:
        """g = log pi - log mu per token, 0 where masked. (B, T)  Raises BadInput without `logp_sync`."""
        return self.log_ratio("lag")

    @property
    def discrepancy(self) -> Array:
        """d = log mu - log q per token, 0 where masked. (B, T)  Raises BadInput without `logp_sync`."""
        return self.log_ratio("discrepancy")

    def rows(self, index: Any) -> "Batch":
        """Those responses alone: a slice or an integer array over the first axis of every field."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return Batch(**{name: v[index] if hasattr(v, "shape") else v for name, v in values.items()})

    def need(self, field: str) -> Array:
        """The named field; BadInput where the batch has none, but that `logp_old` is then `logp_train`, detached."""
        value = getattr(self, field)
        if value is None and field == "logp_old":
            return detach(self.logp_train)
        if value is None:
            raise BadInput(f"batch has no {field}, which this correction or diagnostic needs")
        return value


def check(batch: Batch) -> Batch:
    """The batch itself, once every field has the right shape and every counted entry a possible value.

    Raises BadInput: naming the field (and the first bad position) for a wrong shape, a mask that is not boolean, nan, a
    log-probability above 0, `_all` probabilities that sum to more than 1, a sampler log-probability of -inf (a drawn
    token cannot have had probability 0; the trainer's may), a version newer than the trainer's.
    """
    xp = namespace(batch.logp_train)
    shape = batch.logp_train.shape
    if len(shape) != 2:
        raise BadInput(f"logp_train has shape {tuple(shape)}, expected (B, T)")
    if batch.mask.dtype != xp.bool:
        raise BadInput(f"mask has dtype {batch.mask.dtype}, expected bool")
    for field in fields(batch):
        value = getattr(batch, field.name)
        if value is None or field.name == "version_train":
            continue
        if field.name.endswith("_all"):
            if len(value.shape) != 3 or value.shape[:2] != shape:
                raise BadInput(f"{field.name} has shape {tuple(value.shape)}, expected ({shape[0]}, {shape[1]}, V)")
        elif value.shape != shape and (
            value.shape != (shape[0], 1) or field.name not in ("advantage", "version_rollout")
        ):
            raise BadInput(f"{field.name} has shape {tuple(value.shape)}, expected {tuple(shape)}")
        if field.name.startswith("logp_"):
            mask = batch.mask if len(value.shape) == 2 else batch.mask[..., None]
            clean = 0 in value.shape or bool(xp.max(value) <= LOGP_TOLERANCE)  # one pass where all is well; nan is not
            if not clean:
                _refuse(field.name, "is nan", mask & xp.isnan(value))
                _refuse(field.name, "is above 0", mask & (value > LOGP_TOLERANCE))
            if len(value.shape) == 3:
                value = widen(detach(value))
                total = xp.sum(xp.exp(value if clean else masked(value, mask)), axis=-1)
                too_much = batch.mask & (total > math.exp(SUM_TOLERANCE))
                _refuse(field.name, "has probabilities that sum to more than 1", too_much)
        if field.name == "advantage":
            _refuse(field.name, "is not finite", batch.mask & ~xp.isfinite(value))
    _refuse(
        "logp_rollout",
        "is -inf for a token that was drawn",
        batch.mask & xp.isinf(batch.logp_rollout),
    )
    if batch.version_rollout is not None and batch.version_train is not None:
        newer = batch.mask & (batch.version_rollout > batch.version_train)
        _refuse(
            "version_rollout",
            f"is newer than version_train {batch.version_train}",
            newer,
        )
    return batch


def chunks(batch: Batch, tokens: int = 65536) -> Iterator[Batch]:
    """The batch in consecutive pieces of whole responses, about `tokens` each; one empty piece of an empty batch."""
    size, width = batch.mask.shape
    step = max(1, tokens // max(width, 1))
    for start in range(0, max(size, 1), step):
        yield batch.rows(slice(start, start + step))


def unpack(batch: Batch, segment: Array) -> Batch:
    """One response a row out of rows that hold several (packed sequences), so that no rule ever crosses a border.

    Gradients pass through. `pack` lays weights back on the packed places. The `_all` fields come along.

    Args:
        batch: a packed batch; `advantage` and `version_rollout` per token, or one a row for all its responses.
        segment: which response of its row each token belongs to, any integers; anything where masked. int (B, L)
    Returns:
        one row a (row, segment) that has a counted token, in order of first appearance, padded on the right. (N, T)
    Raises BadInput: no counted token at all; a segment of the wrong shape.
    """
    if tuple(segment.shape) != tuple(batch.mask.shape):
        raise BadInput(f"segment has shape {tuple(segment.shape)}, expected {tuple(batch.mask.shape)}")
    place, mask = _places(np.asarray(batch.mask), np.asarray(segment))
    width = batch.mask.shape[1]

    def gather(name: str, value: Any) -> Any:
        xp = namespace(value)
        if name in ("advantage", "version_rollout") and value.shape[1] == 1:
            value = xp.broadcast_to(value, batch.mask.shape)
        flat = xp.reshape(value, (-1, *value.shape[2:]))
        index = xp.asarray(place // width * value.shape[1] + place % width, device=value.device)
        return xp.reshape(xp.take(flat, xp.reshape(index, (-1,)), axis=0), (*place.shape, *value.shape[2:]))

    changed = {f.name: getattr(batch, f.name) for f in fields(batch)}
    changed = {k: gather(k, v) if hasattr(v, "shape") else v for k, v in changed.items()}
    changed["mask"] = namespace(batch.mask).asarray(mask, device=batch.mask.device)
    return Batch(**changed)


def pack(values: Array, batch: Batch, segment: Array, fill: float = 0.0) -> Array:
    """What `unpack` gave, (N, T) or (N, 1), back on the places of the packed batch, `fill` where masked. (B, L)"""
    xp = namespace(values)
    place, mask = _places(np.asarray(batch.mask), np.asarray(segment))
    response, token = np.nonzero(mask)
    source = np.zeros(batch.mask.shape[0] * batch.mask.shape[1], np.int64)
    source[place[mask]] = response * values.shape[1] + (token if values.shape[1] > 1 else 0)
    index = xp.asarray(source, device=values.device)
    spread = xp.reshape(xp.take(xp.reshape(values, (-1,)), index, axis=0), tuple(batch.mask.shape))
    return masked(spread, batch.mask, fill)


def _places(mask: np.ndarray, segment: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Flat place in the packed batch of token t of response n, and where there is one. int, bool (N, T)"""
    counted = np.flatnonzero(mask)
    if not len(counted):
        raise BadInput("mask has no counted token, so there is nothing to unpack")
    key = np.stack([counted // mask.shape[1], segment.ravel()[counted]], axis=1)
    _, first, response = np.unique(key, axis=0, return_index=True, return_inverse=True)
    rank = np.argsort(np.argsort(first))  # number the responses in order of first appearance
    response = rank[response.ravel()]
    lengths = np.bincount(response)
    real = np.arange(lengths.max()) < lengths[:, None]
    place = np.full(real.shape, counted[0])
    place[real] = counted[np.argsort(response, kind="stable")]
    return place, real


def _refuse(field: str, what: str, bad: Array) -> None:
    xp = namespace(bad)
    if bool(xp.any(bad)):
        first = tuple(int(i[0]) for i in xp.nonzero(bad))
        raise BadInput(f"{field}{list(first)} {what}")
