"""Batch: the log-probabilities of one batch of responses under every policy that had a say in it.

Names (THEORY, who is who): pi = trainer now (`logp_train`), mu = trainer's engine at the sampler's weights
(`logp_sync`), q = what the sampler drew from (`logp_rollout`). Per token: discrepancy d = log mu - log q, lag
g = log pi - log mu, total t = log pi - log q = d + g. Log ratios are always trainer minus sampler, in nats.
"""

from dataclasses import dataclass, fields

from sandbox.arrays import Array, masked, namespace
from sandbox.errors import BadInput

LOGP_TOLERANCE = 1e-5  # a log-probability may exceed 0 by rounding, not by more


@dataclass(frozen=True, eq=False)
class Batch:
    """B responses of up to T tokens over a vocabulary of V; numpy arrays or torch tensors.

    Args:
        logp_train: log pi of the drawn tokens, nats; the only field that carries a gradient. (B, T)
        logp_rollout: log q of the drawn tokens, as the sampler reported them. (B, T)
        mask: True where a token counts; anything, nan included, may stand in the other places. bool (B, T)
        advantage: advantage of each response or token. (B, 1) or (B, T)
        logp_sync: log mu of the drawn tokens. Without it d and g are not identifiable. (B, T)
        logp_old: log-probabilities at the start of the batch, where a PPO-like rule needs them. (B, T)
        logp_train_all, logp_sync_all, logp_rollout_all: the same three over the whole vocabulary,
            for corrections that centre the score. (B, T, V)
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

    @property
    def total(self) -> Array:
        """t = log pi - log q per token, 0 where masked. (B, T)"""
        return masked(self.logp_train, self.mask) - masked(self.logp_rollout, self.mask)

    @property
    def lag(self) -> Array:
        """g = log pi - log mu per token, 0 where masked. (B, T)  Raises BadInput without `logp_sync`."""
        return masked(self.logp_train, self.mask) - masked(self.need("logp_sync"), self.mask)

    @property
    def discrepancy(self) -> Array:
        """d = log mu - log q per token, 0 where masked. (B, T)  Raises BadInput without `logp_sync`."""
        return masked(self.need("logp_sync"), self.mask) - masked(self.logp_rollout, self.mask)

    def need(self, field: str) -> Array:
        """The named field; raises BadInput where the batch has none."""
        value = getattr(self, field)
        if value is None:
            raise BadInput(f"batch has no {field}, which this correction or diagnostic needs")
        return value


def check(batch: Batch) -> Batch:
    """The batch itself, once every field has the right shape and every counted entry a possible value.

    Raises:
        BadInput: naming the field (and the first bad position) for a wrong shape, a mask that is not boolean,
            nan, a log-probability above 0, a sampler log-probability of -inf (a drawn token cannot have had
            probability 0; the trainer's may), a version newer than the trainer's.
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
            _refuse(field.name, "is nan", mask & xp.isnan(value))
            _refuse(field.name, "is above 0", mask & (value > LOGP_TOLERANCE))
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


def _refuse(field: str, what: str, bad: Array) -> None:
    xp = namespace(bad)
    if bool(xp.any(bad)):
        first = tuple(int(i[0]) for i in xp.nonzero(bad))
        raise BadInput(f"{field}{list(first)} {what}")
