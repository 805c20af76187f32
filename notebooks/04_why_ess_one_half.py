# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     name: python3
# ---

# %% [markdown]
# # Why ESS = 1/2
#
# The effective sample size of importance weights, as a fraction of the batch, says how many fresh responses a stale
# batch is worth. Three things decide what a value means: the unit (a whole response or a token), n, and what a sync
# costs.

# %%
from dataclasses import replace

import ipywidgets
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.figure import Figure

from sandbox.corrections import CORRECTIONS
from sandbox.experiments import staleness
from sandbox.metrics import estimators
from sandbox.output import theory_plots
from sandbox.output.interactive import explore
from sandbox.tabular import enumeration, exact, problems
from sandbox.tabular.policy import log_policy
from sandbox.tabular.simulate import SimConfig

# %% [markdown]
# ## What one half means
#
# Exactly, over all sequences of a small tree: the variance of the importance-weighted estimate of the return is about
# 1/ESS times the on-policy one. At one half a batch is worth half a fresh one.

# %%
tree = problems.sparse_tree(np.random.default_rng(0), depth=4, top=0.5)
pairs = enumeration.sequences(tree)
rng = np.random.default_rng(1)
direction = rng.normal(size=tree.shape)
mu = log_policy(np.zeros(tree.shape))
worth = []
for lag in np.linspace(0.0, 0.9, 31):
    pi = log_policy(lag * direction)
    log_mu, log_pi = (p.ravel()[pairs].sum(axis=1) for p in (mu, pi))
    gain = tree.reward.ravel()[pairs].sum(axis=1)
    gain = gain - (np.exp(log_pi) * gain).sum()
    stale = (np.exp(2 * log_pi - log_mu) * gain**2).sum()  # Var_mu[w (R - E_pi R)]
    worth.append((float(exact.ess(tree, pi, mu)), float((np.exp(log_pi) * gain**2).sum() / stale)))
ess, efficiency = np.array(worth).T
np.testing.assert_allclose([ess[0], efficiency[0]], 1.0)
assert np.abs(efficiency - ess)[ess > 0.4].max() < 0.1

# %% [markdown]
# ## Sequence against token
#
# Logits that are off by sd .05: the token KL is 7e-4 at every length and looks healthy. The sequence ESS is .91 at 64
# tokens, .24 at 1,024: its logarithm falls in proportion to the length.

# %%
machine = problems.state_machine(np.random.default_rng(0), 16, 4, 64)
rng = np.random.default_rng(0)
weights, noise = 0.5 * rng.normal(size=machine.shape), rng.normal(size=machine.shape)
LENGTHS = [4, 16, 64, 256, 1024, 4096]


def by_length(sd: float) -> tuple[list[float], list[float]]:
    """Sequence ESS and token KL at each length."""
    mu, pi = log_policy(weights), log_policy(weights + sd * noise)
    cut = [replace(machine, horizon=t) for t in LENGTHS]
    return [float(exact.ess(p, pi, mu)) for p in cut], [float(exact.token_kl(p, pi, mu)) for p in cut]


sequence, token_kl = by_length(0.05)
assert max(token_kl) < 1.2 * min(token_kl) < 1e-3
np.testing.assert_allclose([sequence[LENGTHS.index(64)], sequence[LENGTHS.index(1024)]], [0.91, 0.24], atol=0.01)
np.testing.assert_allclose(np.log(sequence[-1]) / np.log(sequence[-2]), 4, rtol=0.02)

# %% [markdown]
# ## Small samples flatter
#
# Log weights N(0, 1.5^2) have a true ESS of exp(-2.25) = .105. The sample value averages .23 at n = 64: the heavy
# weights that would lower it are the ones that were not drawn. With n = 2 it can never be below 1/2. (400 samples
# each.)

# %%
flattered = {n: float(estimators.ess(rng.normal(0, 1.5, (400, n))).mean()) for n in (2, 64, 256, 1024, 8192)}
print({n: round(value, 3) for n, value in flattered.items()}, "true", round(np.exp(-2.25), 3))
assert flattered[64] > 2 * np.exp(-2.25)
assert list(flattered.values()) == sorted(flattered.values(), reverse=True)
assert estimators.ess(np.array([0.0, 50.0])) >= 0.5

# %% [markdown]
# ## What a sync costs decides the threshold
#
# Token TIS on the machine, a budget of 40 updates, a sync that costs c of them; mean-field training under every
# threshold. The best threshold falls as a sync gets dearer, so 1/2 is not best everywhere. It loses little while a sync
# costs at most two updates.

# %%
start = np.zeros(machine.shape)
thresholds = (0.01, 0.05, 0.2, 0.35, 0.5, 0.65, 0.8, 0.95)
runs = staleness.mean_field_runs(
    machine,
    start,
    SimConfig(CORRECTIONS["tis"], step_size=0.5, steps=40),
    thresholds=thresholds,
    periods=(1, 2, 4, 8, 16),
)
reached = staleness.at_budget(runs, 40, (0.0, 0.5, 1.0, 2.0, 5.0))
before = float(exact.expectation(machine, log_policy(start), machine.reward))
best = staleness.optimum(reached, before)
print(best.select("cost", "best_threshold", "loss", "best_period"))
assert best["best_threshold"].is_sorted(descending=True)
assert best["best_threshold"][0] > 0.5 > best["best_threshold"][-1]
assert best.filter(cost=2.0)["loss"][0] < 0.02

# %%
figure, axes = plt.subplots(1, 3, figsize=(13, 3.8), layout="constrained")
theory_plots.worth(axes[0], ess, efficiency)
theory_plots.ess_by_length(axes[1], LENGTHS, sequence, token_kl)
theory_plots.sync_price(axes[2], reached)

# %% [markdown]
# Move the size of the lag: how long may a response be before the ESS is below one half?


# %%
def draw(sd: float) -> Figure:
    figure = Figure(figsize=(6, 3.6), layout="constrained")
    theory_plots.ess_by_length(figure.subplots(), LENGTHS, *by_length(sd))
    return figure


draw(0.05)

# %%
explore(draw, sd=ipywidgets.FloatLogSlider(0.05, base=10, min=-2.5, max=-0.3, step=0.1, description="sd of logits"))
