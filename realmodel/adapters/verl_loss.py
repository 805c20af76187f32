"""verl: our corrections as policy losses, `actor.policy_loss.loss_mode=mismatch.cis`, and as weights that the driver
makes, `algorithm.rollout_correction.rollout_is=mismatch.cis`.

Every process of verl has to import it: VERL_USE_EXTERNAL_MODULES=realmodel.adapters.verl_loss (examples/verl.sh). That
registers the losses and puts `rollout_correction` in the place of verl's own, which still does what verl's own names
ask for.

verl's loss hook is not given the sampler's log-probabilities. The driver, with `rollout_is=mismatch`, therefore sends
them where it would send weights: the two settings go together. In the loss mu is verl's old_log_prob: the trainer at
the weights of the last sync, where the weights did not move between the sync and the batch (trainers `sync`, and
`separate_async_ess` of `verl_sync.py`); in verl's other asynchronous trainers that holds for some responses only.
"""

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from verl import DataProto  # pyright: ignore[reportMissingImports]
from verl.trainer.ppo import rollout_corr_helper  # pyright: ignore[reportMissingImports]
from verl.trainer.ppo.core_algos import agg_loss, register_policy_loss  # pyright: ignore[reportMissingImports]

from realmodel.adapters.rules import allowed, applied, normalises, refuse
from sandbox.batch import Batch
from sandbox.corrections import METRICS, PRESETS, Correction, losses
from sandbox.errors import BadInput
from sandbox.metrics import ess, sequence_log_weight

CARRY = "mismatch"  # rollout_is that sends the sampler's log-probabilities to a loss of ours
POWERS = (1, 2, 3, 4)


def policy_loss(rule: Correction) -> Callable[..., tuple[Tensor, dict[str, Any]]]:
    """The rule as a policy loss of verl's signature; its denominator is `loss_agg_mode`'s, over all tokens of the mask.

    Metrics, each the mean over micro-batches and ranks that verl makes of it: `mismatch/weight`, `mismatch/rejected`,
    and the sums from which `verl_sync` has the ESS of the global batch.

    Raises BadInput: a rule that centres or divides by a batch mean.
    """
    refuse(rule, str(rule), "verl's loss hook")

    def loss(
        old_log_prob: Tensor,
        log_prob: Tensor,
        advantages: Tensor,
        response_mask: Tensor,
        loss_agg_mode: str = "token-mean",
        config: Any = None,
        rollout_is_weights: Tensor | None = None,
    ) -> tuple[Tensor, dict[str, Any]]:
        if rollout_is_weights is None:
            raise BadInput(f"rollout_log_probs did not reach the loss: set rollout_correction.rollout_is={CARRY}")
        old = old_log_prob.detach()
        batch = Batch(log_prob, rollout_is_weights, response_mask.bool(), advantages, old, old)
        corrected = rule(batch)
        per_token = losses.reinforce_per_token(batch, corrected)
        value = agg_loss(per_token, response_mask, loss_agg_mode, **config.global_batch_info)
        told = torch.stack([applied(batch, corrected).sum(), (batch.mask & ~corrected.keep).sum()])
        weight, rejected = (told / batch.mask.sum().clamp(min=1)).tolist()  # a GPU is waited for once
        return value, {"mismatch/weight": weight, "mismatch/rejected": rejected} | lag_sums(batch)

    return loss


def lag_sums(batch: Batch) -> dict[str, float]:
    """Sums of r, r^2, r^3 and r^4 over responses, r = prod pi/mu, and how many there are.

    verl averages a metric over micro-batches and ranks; the ESS of the global batch is a ratio in which their number
    cancels. Linear, for a mean of logarithms would be of no use: they overflow where log r > 177, and the ESS, then
    undefined, syncs. Rows without a token (verl's padding) do not count.
    """
    r = sequence_log_weight(batch, "lag").double().exp()
    sums = torch.stack([(r**k).sum() for k in POWERS]).tolist()
    return {f"mismatch/lag_r{k}": x for k, x in zip(POWERS, sums, strict=True)} | {"mismatch/lag_n": float(len(r))}


def rollout_correction(batch: DataProto, rollout_corr_config: Any) -> tuple[DataProto, dict[str, float]]:
    """verl's compute_rollout_correction_and_add_to_batch, for `rollout_is` = "mismatch" or "mismatch.<preset>" ours.

    "mismatch" sends log q to a loss of ours. "mismatch.<preset>" makes the weights here, from the whole mini-batch, so
    that rules which divide by its mean can be used: pi = mu = old here, whatever updates do afterwards is verl's own
    loss's affair (PPO in pi/old), and rejected tokens get weight 0 in an unchanged mask, which keeps them in every
    denominator. Metrics: verl's own of the same names, and `rollout_corr/sequence_ess`, raw, of the mini-batch.

    Raises BadInput: a rule that centres or looks at the advantage (not yet computed), rejection asked for by
    rollout_rs.
    """
    wanted = rollout_corr_config.get("rollout_is", None)
    if not isinstance(wanted, str) or wanted.partition(".")[0] != CARRY:
        return VERL_CORRECTION(batch, rollout_corr_config)
    if rollout_corr_config.get("rollout_rs", None) is not None:
        raise BadInput("rollout_correction.rollout_rs rejects a second time: the rule of rollout_is does it")
    old, q = batch.batch["old_log_probs"], batch.batch["rollout_log_probs"]
    seen = Batch(old, q, batch.batch["response_mask"].bool(), torch.zeros_like(old[:, :1]), old)
    name = wanted.partition(".")[2]
    if name:
        rule = allowed(name, "verl's driver", sees_batch=True, sees_advantage=False)
        carried = applied(seen, rule(seen))
    else:
        carried = torch.where(seen.mask, q, 0.0)
    metrics = {f"rollout_corr/{key}": float(value) for key, value in METRICS["verl"](seen).items()}
    metrics["rollout_corr/sequence_ess"] = float(ess(sequence_log_weight(seen, "discrepancy").double()))
    return batch.union(DataProto.from_dict(tensors={"rollout_is_weights": carried})), metrics


VERL_CORRECTION = rollout_corr_helper.compute_rollout_correction_and_add_to_batch

for _name, _rule in PRESETS.items():  # a preset that the hook cannot express is one that verl does not know
    if not _rule.centres and not normalises(_rule):
        register_policy_loss(f"{CARRY}.{_name}")(policy_loss(_rule))

# v1.trainer_base binds the function by name when it is imported, the other trainers look it up at every batch
for _module in (rollout_corr_helper, sys.modules.get("verl.trainer.ppo.v1.trainer_base")):
    if _module is not None:
        setattr(_module, VERL_CORRECTION.__name__, rollout_correction)
