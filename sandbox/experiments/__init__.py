"""What the commands run on tabular problems: predictions, sweeps, the price of a sync, the claims.

`predict`, `exact_report`, `sweep` (with `cluster`) and `staleness` answer a user's own question. `claims` states the
claims; `sources`, `remedies`, `neighbours` and `baseline` test them, and `verdicts` judges.
"""

__all__ = [
    "baseline",
    "claims",
    "cluster",
    "exact_report",
    "neighbours",
    "predict",
    "remedies",
    "sources",
    "staleness",
    "sweep",
    "verdicts",
]
