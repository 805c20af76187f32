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
# # The lag loop
#
# Between two syncs the trainer moves by x and the sampler does not. An uncorrected update misses -M x of the gradient;
# that error enters the next x, so it is a loop, with the gain -eta M per update. A discrepancy adds the same amount to
# every update and closes no loop. Positive gain feeds the lag, negative gain damps it: both occur.

# %%
import ipywidgets
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.figure import Figure

from sandbox.corrections import CORRECTIONS
from sandbox.output import theory_plots
from sandbox.output.interactive import explore
from sandbox.tabular import exact, matrices, problems
from sandbox.tabular.policy import log_policy
from sandbox.tabular.simulate import SimConfig
from sandbox.theory import delay, lag

# %% [markdown]
# ## A bandit
#
# Two arms that pay 0 and 1, a sampler that stays at the uniform policy. There M = 0 (and H = 0): to first order the
# loop does not exist. The uncorrected run still leaves the exactly corrected one behind, in the second order: its
# update never shrinks, because the sampler's batch looks the same at every step.

# %%
bandit = problems.bandit([0.0, 1.0])
start = np.zeros(bandit.shape)
for x in np.eye(2):
    assert np.allclose(lag.left_out(bandit, log_policy(start), x[None]), 0.0, atol=1e-15)
stale, corrected = (
    np.linalg.norm(
        lag.path(bandit, start, SimConfig(CORRECTIONS[name], step_size=0.5, steps=30)).reshape(31, -1), axis=1
    )
    for name in ("none", "seq_is")
)
np.testing.assert_allclose(np.diff(stale), stale[1], rtol=1e-6)  # a straight line
assert corrected[30] < 0.3 * stale[30]

# %% [markdown]
# ## A tree
#
# 4^4 sequences. Where the best tenth earn 1, the loop damps: the exactly corrected run moves *further*. Where the best
# nine tenths do (a sequence fails with probability .1), the loop feeds. Same code, same step size; the reward's shape
# decides.

# %%
runs = {}
for top in (0.1, 0.9):
    tree = problems.sparse_tree(np.random.default_rng(0), depth=4, top=top)
    logits = np.zeros(tree.shape)
    mu = log_policy(logits)
    m = matrices.m_dense(tree, mu) / exact.advantage_scale(tree, mu, "normalised")
    runs[top] = lag.loop_effect(tree, logits, lag.product(m), SimConfig(step_size=1.0, steps=25))
    gain = lag.loop_gain(m, 1.0)
    print(f"best {top:.0%} rewarded: gain per update {gain[-1]:+.3f} .. {gain[0]:+.3f}, feeds: {runs[top].feeds}")
    assert gain[-1] < 0 < gain[0]  # both signs, in either tree
assert not runs[0.1].feeds
assert runs[0.9].feeds

figure, axes = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
for ax, (top, run) in zip(axes, runs.items(), strict=True):
    theory_plots.lag_growth(ax, run.table)
    ax.set_title(f"best {top:.0%} of sequences rewarded", fontsize=10)

# %% [markdown]
# The prediction (dotted) linearises nothing but the bias that the lag leaves. It follows the measured lag for a dozen
# updates.

# %%
for run in runs.values():
    early = run.table.filter(k=10)
    assert abs(early["predicted"][0] / early["lag_none"][0] - 1) < 0.05

# %% [markdown]
# ## A pipeline that is tau updates late
#
# The sampler syncs after every update but its batches are used tau updates later. Around a fixed point with H = 0 and M
# = -kappa the loop is stable up to eta kappa = 2 sin(pi / (2 (2 tau + 1))) (Levin and May 1976): 2, 1, .618, .445 for
# tau = 0, 1, 2, 3. Above it a disturbance grows geometrically, and the sign flips as it goes.

# %%
for tau, critical in enumerate((2.0, 1.0, 0.618, 0.445)):
    assert abs(delay.critical_gain(tau) - critical) < 5e-4
    assert (
        delay.spectral_radius(0.0, -1.0, 0.99 * critical, tau)
        < 1
        < delay.spectral_radius(0.0, -1.0, 1.01 * critical, tau)
    )

# %% [markdown]
# Move the staleness and the gain. Left: a disturbance of size 1 and what becomes of it. Right: how stable, with the
# critical gain.


# %%
def draw(tau: int, gain: float) -> Figure:
    figure = Figure(figsize=(9, 3.4), layout="constrained")
    left, right = figure.subplots(1, 2)
    theory_plots.delayed_loop(left, delay.recursion(0.0, -1.0, 0.0, gain, tau, 1.0, 60)[:, 0])
    theory_plots.stability(right, tau, gain)
    return figure


draw(2, 0.5)

# %%
explore(
    draw,
    tau=ipywidgets.IntSlider(2, min=0, max=16, description="tau"),
    gain=ipywidgets.FloatSlider(0.5, min=0.02, max=2.2, step=0.02, description="eta kappa"),
)
