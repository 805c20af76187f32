"""prime-rl: a custom loss by import path, `[trainer.loss] type = "custom"` (see examples/prime_rl.toml).

prime-rl calls the loss once a sequence, with the log-probabilities of the trainer now (pi) and of the sampler (q). It
sums the results and divides by the global number of loss tokens, rejected ones included. The hook has no mu, no old and
no other sequence. So rules on the lag, the discrepancy, the drift or the batch are refused.
"""

from typing import Any, NamedTuple

from torch import Tensor

from realmodel.adapters.rules import allowed, applied
from sandbox.batch import Batch
from sandbox.corrections import losses


class Outputs(NamedTuple):
    """What prime-rl reads of a loss function's answer: a scalar SUM over tokens, and scalar metrics by name."""

    loss: Tensor
    metrics: dict[str, Tensor]


def loss(inputs: Any, correction: str = "tis", squared_mismatch: float = 0.0) -> Outputs:
    """- sum over kept tokens of weight A log pi, plus tau times the sum of (log pi - log q)^2 over all tokens.

    Args:
        inputs: prime-rl's LossInputs: trainer_logprobs (with gradient), inference_logprobs, advantages, loss_mask
            (bool) and loss_weights (or None), each (T,).
        correction: a preset, or JSON. "prime_rl.default" with squared_mismatch = 1e-3 is prime-rl's own default.
        squared_mismatch: tau of that penalty, nats^-2.
    Raises BadInput: a rule that centres, divides by a batch mean, or needs mu.
    """
    rule = allowed(correction, "prime-rl's loss hook")
    pi, q = inputs.trainer_logprobs[None], inputs.inference_logprobs[None]
    mask, advantage = inputs.loss_mask[None], inputs.advantages[None]
    batch = Batch(pi, q, mask, advantage)
    corrected = rule(batch)
    per_token = losses.reinforce_per_token(batch, corrected)
    if squared_mismatch:
        per_token = per_token + squared_mismatch * batch.total**2
    if inputs.loss_weights is not None:
        per_token = per_token * inputs.loss_weights[None]
    # no metric on the whole sequence but this: the hook is called once a sequence, and prime-rl logs the KL itself
    weight = applied(batch, corrected).sum() / mask.sum().clamp(min=1)
    return Outputs(per_token.sum(), {"mismatch/weight": weight})
