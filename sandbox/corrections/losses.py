"""Surrogate losses whose gradients are the corrected policy-gradient updates, with the denominator spelt out.

`reinforce` is every correction as a loss, the centred surrogate included; `ppo` is the clipped surrogate with its own
value, multiplied by a correction's weights as decoupled trainers do. CISPO and DPPO are `reinforce` with their
correction: `cispo`, `dppo` spell it. Frameworks disagree on whether rejected tokens stay in the denominator: `accounts`
reports both.
"""

import math

from sandbox.arrays import Array, count, detach, masked, namespace
from sandbox.batch import Batch
from sandbox.corrections import ratios
from sandbox.corrections.combinations import Compose
from sandbox.corrections.rejections import ProbabilityBand
from sandbox.corrections.rules import Corrected, PPOClip, Truncate
from sandbox.errors import BadInput

DENOMINATORS = ("fixed", "kept", "responses")


def reinforce(batch: Batch, corrected: Corrected, denominator: str | float = "fixed") -> Array:
    """- sum over kept tokens of weight A (log pi(y) - sum_a centre(a) log pi(a)), over the denominator. A number.

    Its gradient is minus the update that `corrected` stands for; its value means nothing. The centred sum runs over the
    columns of `logp_train_all`: the whole vocabulary or the top k.

    Args:
        denominator: "fixed" counts every token of the mask, rejected ones included (a rejected token shrinks the step);
            "kept" counts kept tokens only; "responses" counts responses, so that long ones weigh more. A number is the
            count itself: that of the global batch, where this one is a micro-batch or a rank's share.
            An empty or wholly rejected batch has loss 0 and gradient 0.
    Raises BadInput: unknown denominator; a centred correction on a batch without `logp_train_all`.
    """
    per_token = reinforce_per_token(batch, corrected)
    return namespace(per_token).sum(per_token) / total(batch, batch.mask & corrected.keep, denominator, per_token)


def reinforce_per_token(batch: Batch, corrected: Corrected) -> Array:
    """What `reinforce` sums, 0 where masked or rejected, for trainers that have a denominator of their own. (B, T)"""
    logp = batch.logp("logp_train")
    xp = namespace(logp)
    weight = corrected.weight * batch.advantage * xp.ones_like(detach(logp))
    # 0 times log 0 is 0; and a token that the trainer gives probability 0 has no score (`accounts` tells)
    live = batch.mask & corrected.keep & (weight != 0) & xp.isfinite(detach(logp))
    score = masked(logp, live)
    if not isinstance(corrected.centre, float):
        train_all = masked(batch.need("logp_train_all"), live[..., None])
        score = score - xp.sum(masked(corrected.centre, live[..., None]) * train_all, axis=-1)
    return -masked(weight, live) * score


def ppo(batch: Batch, corrected: Corrected, clip: PPOClip | None = None, denominator: str | float = "fixed") -> Array:
    """- sum over kept tokens of weight min(rho A, clip(rho, 1 - low, 1 + high) A), over the denominator. Scalar.

    For A < 0 the loss is at most -dual A (dual clip). rho = e^{log ratio `clip.on`} carries the gradient; `clip.on`
    must have pi in its numerator (total, lag, drift). Decoupled PPO: `ppo(batch, Truncate(on="behaviour")(batch),
    PPOClip(on="drift"))`. At the geometric level (GSPO) rho is the response's, so each token gets s/T of the score.

    Raises BadInput for an unknown denominator or a clip on a ratio without pi.
    """
    clip = clip or PPOClip()
    if clip.on not in ("total", "lag", "drift"):
        raise BadInput(f"clip acts on {clip.on!r}, which has no gradient; expected total, lag or drift")
    xp = namespace(batch.logp_train)
    log_ratio = ratios.at_level(batch.log_ratio(clip.on), clip.level, batch.mask)
    ratio = xp.exp(log_ratio)
    kept = batch.mask & corrected.keep
    gain = xp.minimum(ratio * batch.advantage, ratios.limit(ratio, 1 - clip.low, 1 + clip.high) * batch.advantage)
    if not math.isinf(clip.dual):
        gain = xp.where(batch.advantage < 0, xp.maximum(gain, clip.dual * batch.advantage), gain)
    gain = masked(corrected.weight * gain * xp.ones_like(detach(batch.logp("logp_train"))), kept)
    return -xp.sum(gain) / total(batch, kept, denominator, gain)


def cispo(batch: Batch, low: float = 0.2, high: float = 0.2, denominator: str | float = "fixed") -> Array:
    """CISPO (arXiv 2506.13585): - sum of sg(clip(rho, 1 - low, 1 + high)) A log pi over the denominator, rho = pi/q."""
    return reinforce(batch, Truncate("token", 1 + high, floor=1 - low)(batch), denominator)


def dppo(batch: Batch, band: ProbabilityBand | None = None, cap: float = math.inf, denominator="fixed") -> Array:
    """DPPO (arXiv 2602.04879): - sum of sg(min(rho, cap)) A log pi over the tokens that `band` keeps."""
    rule = Compose((Truncate("token", cap), band or ProbabilityBand()))
    return reinforce(batch, rule(batch), denominator)


def squared_mismatch(batch: Batch, tau: float = 1e-3, denominator: str | float = "fixed") -> Array:
    """tau sum of (log pi - log q)^2 over every token of the mask, rejected ones too: prime-rl's penalty. A number"""
    t = batch.total
    return tau * namespace(t).sum(t * t) / total(batch, batch.mask, denominator, t)


def accounts(batch: Batch, corrected: Corrected) -> dict[str, float | str]:
    """What the denominators are and what was rejected; `alarm` is "" or one line that belongs in front of a person.

    loss_fixed and loss_kept are `reinforce` with either denominator; rejected_fraction is a fraction of the mask's
    tokens (0 for an empty batch), rejected_responses of the responses that have any.
    """
    xp = namespace(batch.logp_train)
    kept = batch.mask & corrected.keep
    tokens, left = int(count(batch.mask)), int(count(kept))
    responses, whole = (int(count(xp.any(m, axis=-1))) for m in (batch.mask, kept))
    alarm = "" if left else ("every token is rejected" if tokens else "the mask counts no token")
    for what, bad in (
        ("drawn tokens have probability 0 under the trainer", ~xp.isfinite(detach(batch.logp("logp_train")))),
        ("weights are not finite", ~xp.isfinite(corrected.weight)),
    ):
        if number := int(count(kept & bad)):
            alarm = f"{number} {what}"
    return {
        "loss_fixed": float(detach(reinforce(batch, corrected, "fixed"))),
        "loss_kept": float(detach(reinforce(batch, corrected, "kept"))),
        "tokens": tokens,
        "tokens_kept": left,
        "rejected_fraction": 1 - left / tokens if tokens else 0.0,
        "rejected_responses": 1 - whole / responses if responses else 0.0,
        "alarm": alarm,
    }


def total(batch: Batch, kept: Array, denominator: str | float, like: Array) -> Array | float:
    """What a loss is divided by, at least 1, in the dtype of `like`; `denominator` as in `reinforce`. A number.

    Raises BadInput for another name, or a number that is not above 0.
    """
    if isinstance(denominator, int | float):
        if not denominator > 0:
            raise BadInput(f"denominator is {denominator}, expected a positive number")
        return denominator
    if denominator not in DENOMINATORS:
        raise BadInput(f"denominator is {denominator!r}, expected a number or one of {', '.join(DENOMINATORS)}")
    if denominator == "responses":
        return max(batch.mask.shape[0], 1)
    xp = namespace(like)
    n = count(batch.mask if denominator == "fixed" else kept)
    return xp.astype(xp.where(n > 0, n, xp.ones_like(n)), like.dtype)
