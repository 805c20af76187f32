"""Several real runs held against the theory: the demo, the grid of predictions, the claims.

`study` carries out runs from one start; `demo`, `grid` and `validation` say which runs; `compare` and `claims` read
them; `dryrun` says what a run would need.
"""

__all__ = ["claims", "compare", "demo", "dryrun", "grid", "study", "validation"]
