"""A second copy of the model as the sampler of TRL, where there is no vLLM: a `rollout_func` for MismatchGRPOTrainer.

It draws with transformers' `generate`, in another dtype (bfloat16 by default) and with a cache. So its
log-probabilities differ from the trainer's by real numerics. It loads weights only when the trainer syncs, so they are
really stale. It is not another engine: kernels, batching and sampling are PyTorch's.
"""

from copy import deepcopy
from typing import Any

import torch
from torch import Tensor


class CopySampler:
    """Called by TRL with (prompts, trainer); see `trl_trainer.py` for what it returns.

    Args:
        dtype: of the copy.
        top_k: how many of the most likely tokens it reports at each step; 0 for none.
    """

    def __init__(self, dtype: torch.dtype = torch.bfloat16, top_k: int = 0) -> None:
        self.dtype, self.top_k = dtype, top_k
        self.model: Any = None
        self.version = -1

    @torch.no_grad()
    def __call__(self, prompts: list[str], trainer: Any) -> dict[str, list]:
        self._load(trainer)
        tokenizer, settings = trainer.processing_class, deepcopy(trainer.generation_config)
        settings.return_dict_in_generate = settings.output_scores = True
        prompt_ids = tokenizer(prompts)["input_ids"]
        padded = tokenizer.pad({"input_ids": prompt_ids}, padding_side="left", return_tensors="pt")
        output = self.model.generate(**padded.to(self.model.device), generation_config=settings)
        logp = torch.stack(output.scores, dim=1).float().log_softmax(-1)  # scores: logits as they were sampled from
        drawn = output.sequences[:, padded["input_ids"].shape[1] :]
        eos = torch.isin(drawn, torch.tensor(trainer.eos_token_ids, device=drawn.device))
        lengths = torch.where(eos.any(1), eos.int().argmax(1) + 1, drawn.shape[1]).tolist()

        def cut(values: Tensor) -> list:
            return [row[:n] for row, n in zip(values.cpu(), lengths, strict=True)]

        result = {
            "prompt_ids": prompt_ids,
            "completion_ids": [row.tolist() for row in cut(drawn)],
            "logprobs": [row.tolist() for row in cut(logp.gather(-1, drawn[..., None])[..., 0])],
        }
        if self.top_k:
            values, ids = logp.topk(self.top_k, dim=-1)
            result |= {"top_logprobs": cut(values), "top_token_ids": cut(ids)}
        return result

    def _load(self, trainer: Any) -> None:
        live = trainer.accelerator.unwrap_model(trainer.model)
        if self.model is None:  # not a deep copy: TRL's patched forward would go on calling the trainer's
            self.model = type(live)(live.config).to(device=live.device, dtype=self.dtype).eval()
            self.model.generation_config = live.generation_config
            self.model.load_state_dict(live.state_dict())
        if self.version != trainer.synced_at:
            self.version = trainer.synced_at
            trainable = (p for p, q in zip(self.model.parameters(), live.parameters(), strict=True) if q.requires_grad)
            for mine, theirs in zip(trainable, trainer.sampler_weights, strict=True):
                mine.copy_(theirs)
