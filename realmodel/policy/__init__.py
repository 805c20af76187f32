"""The policy: a Qwen3 built or loaded, its tasks, its log-probabilities, and how a rollout becomes a batch.

Read in this order: `tasks`, `align` (rollout to batch), `logprobs`, `model`, `recipes` and `small` (the models of
our own), `answers` (what vLLM returns).
"""

__all__ = ["align", "answers", "logprobs", "model", "recipes", "small", "tasks"]
