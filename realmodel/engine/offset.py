"""A constant discrepancy inside vLLM: a logits processor that adds one number a token id; only vLLM imports this file.

It runs after the model and before the draw, and the engine reports processed log-probabilities. So q is exactly
log softmax(the engine's logits + offset).
"""

from typing import Any

import torch
from torch import Tensor
from vllm.v1.sample.logits_processor import LogitsProcessor


class TokenOffset(LogitsProcessor):
    """Adds `additional_config["token_offset"]` of the engine's config to every row of logits, nats. (V,)"""

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        self.offset = torch.tensor(vllm_config.additional_config["token_offset"], device=device)

    def apply(self, logits: Tensor) -> Tensor:
        return logits + self.offset

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: Any) -> None:
        """The same for every request: nothing to keep."""
