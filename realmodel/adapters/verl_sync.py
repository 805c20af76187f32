"""verl: `trainer.v1.trainer_mode=separate_async_ess`, verl's asynchronous trainer with the sync made a decision.

verl's `separate_async` syncs the sampler after every `parameter_sync_step` updates. Here it is synced when a resync
rule of ours says so of the sequence ESS of pi/mu on the global batch of the update before. Two more things differ: old
log-probabilities are those of the weights of the last sync however long ago that was, so that they are mu; and the
trainer must have its GPUs to itself (`hybrid_engine=False`), for verl's hybrid replicas take the newest weights
whenever they are lent, and the sampler would hold two versions.
"""

import math
from typing import Any

import numpy as np
from verl.trainer.ppo.v1.trainer_base import register_trainer  # pyright: ignore[reportMissingImports]
from verl.trainer.ppo.v1.trainer_separate_async import (  # pyright: ignore[reportMissingImports]
    PPOTrainerSeparateAsync,
)

from realmodel.adapters.rules import named
from realmodel.adapters.verl_loss import CARRY, POWERS
from sandbox.corrections import Resync
from sandbox.errors import BadInput
from sandbox.metrics import gathered_ess

MODE = "separate_async_ess"


def lag_ess(metrics: dict[str, Any], responses: int) -> tuple[float, float]:
    """ESS of r = prod pi/mu over the global batch, and its standard error, from verl's means of `verl_loss.lag_sums`.

    The means are over as many micro-batches as there are; `responses`, their true number, undoes that.
    """
    n = float(metrics["actor/mismatch/lag_n"])
    if not n > 0:
        return math.nan, math.nan
    with np.errstate(divide="ignore", over="ignore"):
        log_mean = [np.log(metrics[f"actor/mismatch/lag_r{k}"] / n) for k in POWERS]
    return gathered_ess(np.array([[x + math.log(responses) for x in log_mean] + [responses]]))


@register_trainer(MODE)
class EssSyncTrainer(PPOTrainerSeparateAsync):
    """separate_async, synced by `+trainer.v1.separate_async_ess.resync=<preset or JSON>` (default ess_below)."""

    def __init__(self, config: Any) -> None:
        self.resync: Resync = named(config.trainer.v1.get(MODE, {}).get("resync", "ess_below"), Resync)
        for field, wanted in {
            "trainer.v1.separate_async.parameter_sync_step": 1,
            "actor_rollout_ref.hybrid_engine": False,
            "actor_rollout_ref.actor.ppo_epochs": 1,
            "actor_rollout_ref.rollout.calculate_log_probs": True,
            "algorithm.rollout_correction.rollout_is": CARRY,
        }.items():
            value: Any = config
            for part in field.split("."):
                value = value.get(part)
            if value != wanted:
                raise BadInput(f"{field} is {value}, {MODE} needs {wanted}")
        loss_mode = config.actor_rollout_ref.actor.policy_loss.loss_mode
        if not str(loss_mode).startswith(f"{CARRY}."):
            raise BadInput(f"policy_loss.loss_mode is {loss_mode}, {MODE} needs one of ours, {CARRY}.<preset>")
        super().__init__(config)
        self.synced_at = 0  # the global step after which the sampler's weights were taken
        self.sync_due = False

    def on_init_end(self) -> None:
        super().on_init_end()
        self.synced_at = self.global_steps

    def _compute_old_log_prob(self, batch: Any, metrics: dict) -> Any:
        """log mu. verl keeps the weights of local_trigger_step 0 and evaluates later steps of its cycle at them."""
        self.local_trigger_step = self.global_steps - 1 - self.synced_at
        return super()._compute_old_log_prob(batch, metrics)

    def _update_actor(self, batch: Any, metrics: dict) -> Any:
        batch = super()._update_actor(batch, metrics)
        responses = sum(not tag.get("is_padding", False) for tag in batch.tags)
        ess, error = lag_ess(metrics, responses)
        for key in [key for key in metrics if key.startswith("actor/mismatch/lag_")]:
            del metrics[key]
        since = self.global_steps - self.synced_at
        self.sync_due = self.resync(since, ess, error)
        metrics |= {"mismatch/lag_ess": ess, "mismatch/lag_ess_se": error, "mismatch/steps_since_sync": since}
        metrics["mismatch/synced"] = float(self.sync_due)
        # responses drawn before the last sync, or across it: what verl calls old is not their mu
        other = [{tag["min_global_steps"], tag["max_global_steps"]} != {self.synced_at} for tag in batch.tags]
        metrics["mismatch/rows_of_other_versions"] = sum(other) / len(other)
        return batch

    def on_step_end(self) -> None:
        if self.sync_due:
            super().on_step_end()
            self.synced_at = self.global_steps
        elif self.prev_step_profile:  # what verl's own does here besides the sync
            self._stop_rollout_profiling()
