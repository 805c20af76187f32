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
# # Predicting the collapse step
#
# `ess_step` is the number of optimiser updates since the sync until the sequence ESS of the lag is below 1/2. It can be
# predicted from what is known just after the sync. `failure_step` is another event: the first lasting drop of the
# return below on-policy training.

# %%
import math

import ipywidgets
import matplotlib.pyplot as plt
import numpy as np
import polars as pl
from matplotlib.figure import Figure

from sandbox.corrections import CORRECTIONS, EveryK
from sandbox.output import plots, theory_plots
from sandbox.output.interactive import explore
from sandbox.tabular import problems, simulate
from sandbox.tabular.simulate import SimConfig
from sandbox.theory import collapse, levels

tree = problems.sparse_tree(np.random.default_rng(1))  # 4^6 sequences, the best tenth earn 1
start = np.zeros(tree.shape)

# %% [markdown]
# Three levels. **Closed form**: Var[log w] = a k^2 + b k from drift and noise of the first update, and ESS ~ exp(-Var).
# **Linearised**: the lag's own effect on the update, to first order. **Mean field**: the exact expected update,
# iterated.

# %%
rows = []
for step_size in (0.25, 0.5, 1.0, 2.0, 4.0):
    closed = levels.closed_form(tree, start, step_size, 256)
    field = levels.mean_field(tree, start, SimConfig(step_size=step_size, steps=80))
    rows.append({"step size": step_size, "closed form": closed.ess_step, "mean field": field.ess_step})
table = pl.DataFrame(rows)
print(table)
assert table["closed form"].to_list() == [54, 27, 14, 7, 4]

# %% [markdown]
# Simulated runs, each with its own noise, scatter about the mean field.

# %%
config = simulate.SimConfig(step_size=1.0, steps=40, seed=3)
runs = simulate.run(tree, start, config, range(12))
steps = simulate.ess_steps(runs.table)["ess_step"]
print("simulated ess_step", sorted(steps), "mean field", rows[2]["mean field"])
assert abs(np.median(steps) - rows[2]["mean field"]) <= 2

# %% [markdown]
# On a real model drift and noise are out of reach, but Var[log w] of the first updates is measured for free. Fit the
# updates with Var <= ln 2 / 8 and extrapolate to ln 2: out of sample, with an interval, and with two honest ways to
# decline: "no collapse within the horizon", and "not identifiable" for fewer than three points.

# %%
one = runs.table.filter(run=0)
variance = -np.log(one["ess"].to_numpy())  # of a log-normal weight with that ESS
fit = collapse.fit_collapse(one["step"].to_numpy(), variance, horizon=40)
print(fit.status, fit.ess_step, "from", fit.points_used, "updates, 90 %", fit.interval, "observed", steps[0])
assert fit.status == "predicted"
assert abs(fit.ess_step / steps[0] - 1) < 0.25
assert collapse.fit_collapse([1, 2], [0.01, 0.02]).status == "not_identifiable"

# %% [markdown]
# Two events. Below: the ESS, and the return against on-policy training (mean and central 90 % of 12 runs). An
# uncorrected run's return can leave on-policy before the ESS says anything, or long after.

# %%
on_policy = simulate.run(tree, start, simulate.SimConfig(resync=EveryK(1), steps=40, seed=4), range(12))
stale, fresh = (table["return"].to_numpy().reshape(12, -1) for table in (runs.table, on_policy.table))
failures = 1 + collapse.failure_steps(stale, fresh)  # the first measurement follows the first update
print("failure_step", sorted(failures.tolist()), "ess_step", sorted(steps))
figure, axes = plt.subplots(1, 2, figsize=(10, 3.8), layout="constrained")
mean = {
    name: result.table.group_by("step", maintain_order=True).agg(
        pl.col("return", "ess").mean(),
        low=pl.col("ess").quantile(0.05),
        high=pl.col("ess").quantile(0.95),
        return_low=pl.col("return").quantile(0.05),
        return_high=pl.col("return").quantile(0.95),
    )
    for name, result in (("on-policy", on_policy), ("none", runs))
}
plots.ess_curves(axes[0], {"none": mean["none"]})
plots.prediction_marks(axes[0], {"none": rows[2]["closed form"]})
plots.value_curves(axes[1], mean.items(), "return", "return")
for ax in axes:
    ax.legend(fontsize=8)
assert math.isfinite(np.median(failures))

# %% [markdown]
# In a corrected run the lag saturates. The closed form does not see that and predicts collapses that do not come. The
# linearised level uses the update that is really applied and is better; the mean field is best. Move step size and
# correction.


# %%
def draw(correction: str, step_size: float) -> Figure:
    small = problems.sparse_tree(np.random.default_rng(1), depth=4)
    at = np.zeros(small.shape)
    closed = levels.closed_form(small, at, step_size, math.inf)
    curve, linear = levels.linearised(small, at, SimConfig(CORRECTIONS[correction], step_size=step_size, steps=24), 0.0)
    field = levels.mean_field(small, at, SimConfig(CORRECTIONS[correction], step_size=step_size, steps=24))
    figure = Figure(figsize=(8, 3.6), layout="constrained")
    curves = {
        "closed form": (closed.a * np.arange(1, 25) ** 2, closed.ess_step),
        "linearised": (curve, linear),
        "mean field": (-np.log(field.table["ess"].to_numpy()), field.ess_step),
    }
    theory_plots.prediction_levels(figure.subplots(), curves)
    return figure


draw("tis", 1.0)

# %%
explore(
    draw,
    correction=ipywidgets.Dropdown(options=["none", "tis", "dlc", "cis", "icepop"], value="tis"),
    step_size=ipywidgets.FloatSlider(1.0, min=0.1, max=4.0, step=0.1, description="step size"),
)
