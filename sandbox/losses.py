"""Surrogate losses whose gradients are the corrected policy-gradient updates, with the denominator spelt out."""

from sandbox.arrays import Array, masked, namespace
from sandbox.batch import Batch
from sandbox.corrections import Corrected
from sandbox.errors import BadInput

DENOMINATORS = ("fixed", "kept", "responses")


def reinforce(batch: Batch, corrected: Corrected, denominator: str = "fixed") -> Array:
    """- sum over kept tokens of weight A (log pi(y) - sum_a centre(a) log pi(a)), over the denominator. Scalar.

    Its gradient is minus the update that `corrected` stands for; its value means nothing.

    Args:
        denominator: "fixed" counts every token of the mask, rejected ones included (a rejected token shrinks the step);
            "kept" counts kept tokens only; "responses" counts responses, so that long ones weigh more.
            An empty or wholly rejected batch has loss 0 and gradient 0.
    Raises:
        BadInput: unknown denominator; a centred correction on a batch without `logp_train_all`.
    """
    if denominator not in DENOMINATORS:
        raise BadInput(f"denominator is {denominator!r}, expected one of {', '.join(DENOMINATORS)}")
    xp = namespace(batch.logp_train)
    kept = batch.mask & corrected.keep
    score = masked(batch.logp_train, kept)
    if not isinstance(corrected.centre, float):
        train_all = masked(batch.need("logp_train_all"), kept[..., None])
        score = score - xp.sum(corrected.centre * train_all, axis=-1)
    weight_times_advantage = masked(corrected.weight * batch.advantage * xp.ones_like(score), kept)
    counted = batch.mask if denominator == "fixed" else kept
    count = batch.mask.shape[0] if denominator == "responses" else int(xp.sum(xp.astype(counted, xp.int64)))
    return -xp.sum(weight_times_advantage * score) / max(count, 1)
