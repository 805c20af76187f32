"""When the sequence ESS collapses, and why: predictions of ess_step, the lag's feedback loop, constant delays.

Read in this order: `collapse` (the fit to measured curves, failure_step), `lag` (the loop between two syncs), `levels`
(closed form, linearised, mean field), `delay` (a constant lag), `derivations` (the same formulas in sympy).
"""

__all__ = ["collapse", "delay", "derivations", "lag", "levels"]
