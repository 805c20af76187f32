"""TRL: a GRPOTrainer whose update is a correction of ours and whose sampler is synced by a rule.

    MismatchGRPOTrainer(model, rewards, MismatchGRPOConfig(correction="dlc", resync="ess_below", use_vllm=True), ...)

At every sync the trainable weights are kept; every batch of responses is evaluated at them (mu, `sync_per_token_logps`)
besides at the weights now (pi, in the loss), and the sampler reports q. So all three log-probabilities exist, and rules
that centre get them over the sampler's `centre_top_k` tokens. After every optimiser update the resync rule sees the ESS
of pi/mu on the global batch of that update; TRL can load weights only before it generates, so the sync then happens.

The sampler is TRL's own vLLM (`use_vllm`), or a `rollout_func` that loads new weights where `trainer.synced_at` has
changed (`trl_sampler.py` is one) and may return `top_logprobs` and `top_token_ids`, of each response (T, k).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from trl import GRPOConfig, GRPOTrainer  # pyright: ignore[reportMissingImports]

from realmodel.adapters.ranks import global_ess
from realmodel.adapters.rules import named, normalises
from sandbox.arrays import widen
from sandbox.batch import Batch, check
from sandbox.corrections import Correction, Resync, losses
from sandbox.errors import BadInput
from sandbox.metrics import sequence_log_weight

DENOMINATORS = ("grpo", "bnpo", "dr_grpo", "dapo")  # values of TRL's loss_type that only say what is divided by


@dataclass
class MismatchGRPOConfig(GRPOConfig):
    """GRPOConfig with three more fields; TRL's own importance sampling correction is off, for ours replaces it.

    Args:
        correction: a preset, or JSON such as {"preset": "dlc", "cap": 3.0}.
        resync: likewise: never, every, ess_below, ess_lower.
        centre_top_k: how many of the sampler's most likely tokens a rule that centres looks at; vLLM allows 20.
    """

    correction: str = field(default="dlc", metadata={"help": "preset or JSON of the correction"})
    resync: str = field(default="ess_below", metadata={"help": "preset or JSON of the rule that syncs the sampler"})
    centre_top_k: int = field(default=20, metadata={"help": "tokens over which the score is centred"})
    vllm_importance_sampling_correction: bool = field(default=False, metadata={"help": "TRL's own; must stay off"})


class MismatchGRPOTrainer(GRPOTrainer):
    """GRPOTrainer for a MismatchGRPOConfig, with the arguments of GRPOTrainer.

    `loss_type` says what is divided by (grpo, bnpo, dr_grpo, dapo); there is no clip but the correction's.

    Raises BadInput: a setting that would change the update behind the correction's back.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.correction: Correction = named(self.args.correction, Correction)
        self.resync: Resync = named(self.args.resync, Resync)
        _refuse(self)
        self.synced_at = -1  # optimiser updates when the sampler's weights were taken; -1: it has none yet
        self.sampler_weights: list[Tensor] = []  # the trainable ones, in the order of model.parameters()
        self._sync_due = True
        self._top: tuple[list, list] | None = None  # the sampler's most likely tokens of the responses just drawn
        self._log_weights: list[Tensor] = []  # of pi/mu, of this optimiser update's micro-batches
        if self.use_vllm and self.correction.centres:
            _ask_vllm_for_top_k(self)

    def _generate(self, prompts: list) -> Any:
        if self._sync_due and (self.model.training or self.synced_at < 0):  # evaluation never syncs
            self.synced_at, self._sync_due = self.state.global_step, False
            self.sampler_weights = [p.detach().clone() for p in self._trainable()]
        elif self.use_vllm:
            self._last_loaded_step = self.state.global_step  # what TRL compares to see whether to load weights
        drawn = super()._generate(prompts)
        extra = drawn[5]
        if "top_logprobs" in extra:
            self._top = extra.pop("top_logprobs"), extra.pop("top_token_ids")
        return drawn

    def _generate_and_score_completions(self, inputs: list) -> dict[str, Any]:
        output = super()._generate_and_score_completions(inputs)
        if "pixel_values" in output:
            raise BadInput("pixel_values: responses to images are not supported")
        if "sampling_per_token_logps" not in output:
            raise BadInput("sampler reports no log-probabilities: set use_vllm, or give a rollout_func that does")
        if self.correction.centres:
            if self._top is None:
                raise BadInput(f"{self.args.correction} centres the score, and rollout_func returned no top_logprobs")
            output |= _padded_top(*self._top, output["completion_ids"], self.args.centre_top_k)
            self._top = None
        q = output["sampling_per_token_logps"]
        if self._fresh_until_used():
            check(self._batch(q.nan_to_num(), None, output))  # mu is pi: nobody has to evaluate it twice
            return output
        with torch.no_grad(), self._at_sampler_weights():
            drawn, top = self._log_probs(self.model, output)
        output["sync_per_token_logps"] = drawn
        if top is not None:
            output["sync_top_logps"] = top
        # of the tables over several tokens, the sampler's alone is not our own
        check(replace(self._batch(drawn, top, output), logp_train_all=None, logp_sync_all=None))
        return output

    def _fresh_until_used(self) -> bool:
        """Whether the sampler holds the trainer's weights, and the responses make one update: pi in the loss is mu."""
        updates = self.args.steps_per_generation * self.num_iterations / self.args.gradient_accumulation_steps
        return self.state.global_step == self.synced_at and updates <= 1

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        batch = self._batch(*self._log_probs(model, inputs), inputs)
        corrected = self.correction(batch)
        loss = self._divided(losses.reinforce_per_token(batch, corrected), batch.mask, inputs)
        mode = "train" if self.model.training else "eval"
        tokens = batch.mask.sum().clamp(min=1)
        rejected = (batch.mask & ~corrected.keep).sum() / tokens
        self._metrics[mode]["mismatch/rejected"].append(rejected.item())
        if mode == "train":
            self._log_weights.append(sequence_log_weight(batch, "lag"))
            if self.accelerator.sync_gradients:
                self._decide()
        return loss

    def _decide(self) -> None:
        """Asks the resync rule about the update that is about to be made."""
        ess, error = global_ess(torch.cat(self._log_weights))
        self._log_weights = []
        since = self.state.global_step + 1 - self.synced_at
        self._sync_due = self.resync(since, ess, error) or self._sync_due
        logged = {"lag_ess": ess, "steps_since_sync": since, "sync_due": self._sync_due}
        for name, value in logged.items():
            self._metrics["train"][f"mismatch/{name}"].append(float(value))

    def _trainable(self) -> list[Tensor]:
        return [p for p in self.model.parameters() if p.requires_grad]

    @contextmanager
    def _at_sampler_weights(self) -> Iterator[None]:
        """The model holds the sampler's weights inside. In place, so that shards stay shards."""
        pairs = list(zip(self._trainable(), self.sampler_weights, strict=True))

        def swap() -> None:
            for live, kept in pairs:
                now = live.detach().clone()
                live.data.copy_(kept)
                kept.copy_(now)

        stale = self.state.global_step != self.synced_at
        if stale:
            swap()
        try:
            yield
        finally:
            if stale:
                swap()

    def _log_probs(self, model: Any, inputs: dict[str, Any]) -> tuple[Tensor, Tensor | None]:
        """log-probabilities at TRL's temperature of the drawn tokens (B, T) and of the sampler's top k (B, T, k)."""
        ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
        attention = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
        width = inputs["completion_ids"].shape[1]
        size = self.args.per_device_train_batch_size
        if "top_token_ids" not in inputs:
            return self._get_per_token_logps_and_entropies(model, ids, attention, width, batch_size=size)[0], None
        # TRL's fused head scores the drawn tokens alone
        wanted = torch.cat([inputs["completion_ids"][..., None], inputs["top_token_ids"]], dim=-1)
        pieces = []
        for piece in zip(ids.split(size), attention.split(size), wanted.split(size), strict=True):
            with self.accelerator.autocast():
                request = {"input_ids": piece[0], "attention_mask": piece[1], "logits_to_keep": width + 1}
                logits = model(**request, use_cache=False).logits[:, :-1]
            pieces.append((widen(logits) / self.temperature).log_softmax(-1).gather(-1, piece[2]))
        chosen = torch.cat(pieces)
        return chosen[..., 0], chosen[..., 1:]

    def _batch(self, drawn: Tensor, top: Tensor | None, inputs: dict[str, Any]) -> Batch:
        mu, q = inputs.get("sync_per_token_logps", drawn.detach()), inputs["sampling_per_token_logps"]
        mask = inputs["completion_mask"] * inputs.get("tool_mask", 1)
        advantage = inputs["advantages"]
        return Batch(
            drawn,
            torch.where(q.isnan(), mu, q.to(mu.dtype)),  # vLLM failed to score the token: no discrepancy is assumed
            mask.bool(),
            advantage[:, None] if advantage.ndim == 1 else advantage,
            mu,
            inputs.get("old_per_token_logps"),
            top,
            inputs.get("sync_top_logps", None if top is None else top.detach()),
            inputs.get("sampling_top_logps"),
        )

    def _divided(self, per_token: Tensor, mask: Tensor, inputs: dict[str, Any]) -> Tensor:
        """The sum over what TRL's `loss_type` divides by; rejected tokens count."""
        steps = self.current_gradient_accumulation_steps if self.model.training else 1
        if self.loss_type == "grpo":
            return (per_token.sum(-1) / mask.sum(-1).clamp(min=1)).mean() / steps
        if self.loss_type == "bnpo":
            return per_token.sum() / mask.sum().clamp(min=1) / steps
        if self.loss_type == "dr_grpo":
            return per_token.sum() / (len(per_token) * self.max_completion_length) / steps
        tokens = inputs["num_items_in_batch"].clamp(min=1) / self.accelerator.num_processes  # of the generation batch
        return per_token.sum() / (tokens * (steps / self.args.steps_per_generation if self.model.training else 1))


def _padded_top(logprobs: list, ids: list, completion_ids: Tensor, k: int) -> dict[str, Tensor]:
    """The sampler's k most likely tokens as tensors (B, T, k); token 0 at log-probability 0 where padded."""
    width, device = completion_ids.shape[1], completion_ids.device
    tables = [[_table(rows) for rows in column] for column in (logprobs, ids)]
    for b, (values, tokens) in enumerate(zip(*tables, strict=True)):
        if values.ndim != 2 or values.shape != tokens.shape or values.shape[1] < k or len(values) > width:
            raise BadInput(f"top_logprobs[{b}] has shape {tuple(values.shape)}, expected (T, {k})")
    lengths = torch.tensor([len(values) for values in tables[0]])
    drawn = torch.arange(width) < lengths[:, None]

    def padded(rows: list[Tensor], dtype: torch.dtype) -> Tensor:
        flat = torch.cat(rows)[:, :k].to(dtype)
        if len(flat) < drawn.numel():
            flat = torch.zeros((drawn.numel(), k), dtype=dtype).masked_scatter_(drawn.reshape(-1, 1), flat)
        return flat.reshape(*drawn.shape, k).to(device)

    return {"top_token_ids": padded(tables[1], torch.long), "sampling_top_logps": padded(tables[0], torch.float32)}


def _table(rows: Any) -> Tensor:
    return rows if isinstance(rows, Tensor) else torch.from_numpy(np.asarray(rows))  # numpy reads lists much faster


def _ask_vllm_for_top_k(trainer: MismatchGRPOTrainer) -> None:
    """Has TRL's vLLM report its k most likely tokens too, and hands TRL the drawn ones as it expects them."""
    engine, k = trainer.vllm_generation, trainer.args.centre_top_k
    generate, engine.logprobs = engine.generate, k

    def with_top_k(**request: Any) -> tuple:
        prompt_ids, completion_ids, logprobs, token_ids = generate(**request)
        trainer._top = [[r[:k] for r in row] for row in logprobs], [[r[:k] for r in row] for row in token_ids]
        drawn = [
            [[values[tokens.index(token)]] for values, tokens, token in zip(*row, strict=True)]
            for row in zip(logprobs, token_ids, completion_ids, strict=True)
        ]
        return prompt_ids, completion_ids, drawn, completion_ids

    engine.generate = with_top_k


def _refuse(trainer: MismatchGRPOTrainer) -> None:
    args, rule = trainer.args, trainer.correction
    whole = args.top_p == 1 and not args.top_k and not args.min_p and args.repetition_penalty == 1
    parts = trainer.accelerator.num_processes * args.gradient_accumulation_steps * args.steps_per_generation
    for wrong, message in (
        (args.loss_type not in DENOMINATORS, f"loss_type is {args.loss_type!r}, expected one of {DENOMINATORS}"),
        (
            not whole,
            "top_p, top_k, min_p or repetition_penalty: the sampler would draw from less than it scores",
        ),
        (args.beta != 0, f"beta is {args.beta}: no KL term is added to a correction"),
        (args.vllm_importance_sampling_correction, "vllm_importance_sampling_correction corrects a second time"),
        (args.off_policy_mask_threshold is not None, "off_policy_mask_threshold: use correction opsm"),
        (trainer.top_entropy_quantile < 1, "top_entropy_quantile below 1 is not supported"),
        (trainer._entropy_bonus_enabled, "entropy_coef: no entropy bonus is added to a correction"),
        (trainer.aux_loss_enabled, "router_aux_loss_coef: no router loss is added to a correction"),
        (args.vllm_enable_sleep_mode, "vllm_enable_sleep_mode loads the newest weights whenever the engine wakes"),
        (trainer.is_deepspeed_enabled, "deepspeed: shards of weights cannot be kept and put back"),
        (rule.centres and bool(trainer.tools), "tools: a rule that centres needs responses drawn in one piece"),
        (normalises(rule) and parts != 1, f"{args.correction} divides by a batch mean, the batch is in {parts} parts"),
        (args.centre_top_k < 1, f"centre_top_k is {args.centre_top_k}, expected at least 1"),
    ):
        if wrong:
            raise BadInput(message)
