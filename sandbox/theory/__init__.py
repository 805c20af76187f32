"""When the sequence ESS collapses, and why: predictions of ess_step, the lag's feedback loop, constant delays.

Read in this order: `collapse` (the fit to measured curves, failure_step), `lag` (the loop between two syncs), `levels`
(closed form, linearised, mean field), `delay` (a constant lag).
"""

__all__ = ["collapse", "delay", "lag", "levels"]
