"""Other people's files: readers of public formats, hooks that write the canonical table, the page of a diagnosis."""

__all__ = ["diagnosis", "hooks", "readers", "torch_dumps"]
