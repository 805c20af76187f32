"""What is measured of a batch: effective sample size, KL, Pareto k, the split into discrepancy and lag, alarms.

Read in this order: `estimators` (one function a number), `summary` (one pass over the tokens), `report` (everything at
once, from a summary). Imports numpy and array-api-compat only; Pareto k imports arviz-stats when it is called.
"""

from sandbox.metrics import estimators, summary
from sandbox.metrics.estimators import (
    Decomposition,
    bootstrap_ess,
    chi2,
    decompose,
    ess,
    ess_and_influence,
    ess_interval,
    ess_standard_error,
    ess_sums,
    gathered_ess,
    kl_sampler_train,
    pareto_k,
    pareto_k_limit,
    pareto_tail,
    renyi2,
    resamples,
    sequence_log_weight,
    top_share,
)  # fmt: skip
from sandbox.metrics.report import Report, report
from sandbox.metrics.summary import Summary, merge, summarise

__all__ = [
    "Decomposition", "Report", "Summary", "bootstrap_ess", "chi2", "decompose", "ess", "ess_and_influence",
    "ess_interval", "ess_standard_error", "ess_sums", "estimators", "gathered_ess", "kl_sampler_train", "merge",
    "pareto_k", "pareto_k_limit", "pareto_tail", "renyi2", "report", "resamples", "sequence_log_weight", "summarise",
    "summary", "top_share",
]  # fmt: skip
