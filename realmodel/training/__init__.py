"""The training loop of a real model, resumable at any step.

Read in this order: `settings` (one run as data), `train` (the loop), `underway` (what it carries from step to step),
`record` (what it writes), `checkpoint`.
"""

__all__ = ["checkpoint", "record", "settings", "train", "underway"]
