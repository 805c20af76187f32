"""The exact world: tabular policies on small problems, every quantity by recursion, and training simulated beside it.

Read in this order: `problems`, `policy` (trainer, sampler's weights, sampler), `recursions`, `exact` (returns, ESS, KL,
gradient, expected update), `enumeration` (the slow way, for rules that look at whole responses), `bias`, `matrices`,
`simulate` with its compiled loops in `kernels`.
"""

__all__ = ["bias", "enumeration", "exact", "kernels", "matrices", "policy", "problems", "recursions", "simulate"]
