"""slime (and miles, which has the same hook): a custom TIS function, `--use-tis --custom-tis-function-path` (see
examples/slime.sh).

slime calls it once a micro-batch with the PPO loss of every token, the log-probabilities of the trainer at the start of
the batch (old) and those of the sampler (q). It can express a weight on old/q and nothing else: pi/old is already in
slime's loss, and there is no mu. The loss already contains the advantage, so rules that look at the sign of A are
refused. In a rule, `pi` means old here.
"""

from typing import Any

import torch
from torch import Tensor

from realmodel.adapters.rules import allowed, applied
from sandbox.batch import Batch
from sandbox.errors import BadInput


def tis(
    args: Any,
    *,
    pg_loss: Tensor,
    train_log_probs: list[Tensor],
    rollout_log_probs: list[Tensor],
    loss_masks: list[Tensor],
    **_: Any,
) -> tuple[Tensor, list[Tensor], dict[str, Tensor]]:
    """slime's loss times our weights, its masks less the tokens that we reject, and metrics per token.

    slime's denominators come from the masks before rejection, so a rejected token shrinks the step ("fixed").

    Args:
        args: slime's; `mismatch_correction` of the YAML at --custom-config-path names the rule ("tis" without it).
        pg_loss: loss of the local tokens, response after response. (sum of T_i,)
        train_log_probs: old. B tensors (T_i,)
        rollout_log_probs: q. B tensors (T_i,)
        loss_masks: B tensors (T_i,), 0 or 1
    Raises BadInput: a rule that centres, needs mu or the advantage; log-probabilities shorter than their mask, which is
    context parallelism.
    """
    name = getattr(args, "mismatch_correction", "tis")
    # sees_batch: slime's own rules too divide by the mean of what one call holds, the micro-batch
    rule = allowed(name, "slime's TIS hook", sees_batch=True, sees_advantage=False)
    lengths = [m.shape[0] for m in loss_masks]  # len(m) takes ten times longer
    if [logp.shape[0] for logp in train_log_probs] != lengths:
        raise BadInput("train_log_probs are shards of responses: context parallelism is not supported by this hook")
    old, q, mask = (torch.cat(parts)[None] for parts in (train_log_probs, rollout_log_probs, loss_masks))
    dtype, real = mask.dtype, None
    if not rule.factors:  # a rule on tokens alone does not care in which row they stand
        limits = torch.tensor(lengths, device=pg_loss.device)
        real = torch.arange(max(lengths), device=pg_loss.device) < limits[:, None]
        old, q, mask = (_padded(flat[0], real) for flat in (old, q, mask))
    counted = mask.bool()
    batch = Batch(old.detach(), q, counted, torch.zeros_like(old[:, :1]))
    corrected = rule(batch)
    weight, keep, before = (
        rows[0] if real is None else rows[real]
        for rows in (applied(batch, corrected), counted & corrected.keep, counted)
    )
    metrics = {"mismatch_weight": weight, "mismatch_rejected": (before & ~keep).to(weight.dtype)}
    rejects = corrected.keep is not counted  # else the masks are the ones that came
    masks = list(keep.to(dtype).split(lengths)) if rejects else loss_masks
    return torch.where(weight > 0, pg_loss, 0.0) * weight, masks, metrics


def _padded(flat: Tensor, real: Tensor) -> Tensor:
    """Responses one a row, 0 where `real` has no token. (N,) -> (B, T)"""
    rows = torch.zeros(real.shape, dtype=flat.dtype, device=flat.device)
    rows[real] = flat
    return rows
