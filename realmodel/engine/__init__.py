"""Who draws: vLLM or the exact engine, and how the trainer's weights get there and are checked.

`sampler` starts engines and generates; `exact` is the engine without mismatch; `sync` pushes weights and proves that
they arrived; `offset` runs inside vLLM.
"""

__all__ = ["exact", "offset", "sampler", "sync"]
