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
# # Corrections side by side
#
# A correction trades bias for variance. On a small tree both are exact for every one of them, whole-sequence rules and
# PPO included: all 256 sequences are added up.

# %%
import ipywidgets
import matplotlib.pyplot as plt
import numpy as np
import polars as pl
from matplotlib.figure import Figure

from sandbox.corrections import CORRECTIONS, EveryK
from sandbox.output import plots, theory_plots
from sandbox.output.interactive import explore
from sandbox.tabular import enumeration, exact, problems, simulate
from sandbox.tabular.policy import ConstantOffset, policies

tree = problems.sparse_tree(np.random.default_rng(0), depth=4, top=0.3)
rng = np.random.default_rng(1)
weights = 0.5 * rng.normal(size=tree.shape)
direction, offset = rng.normal(size=(2, *tree.shape))


def tradeoff(discrepancy: float, lag: float) -> pl.DataFrame:
    """Bias, and noise of a batch of 256, of every correction's update, in units of the gradient."""
    now = policies(weights + lag * direction, weights, discrepancy * offset)
    gradient, baseline = exact.gradient(tree, now.train), float(exact.expectation(tree, now.rollout, tree.reward))
    unit = np.linalg.norm(gradient)
    rows = []
    for name, correction in CORRECTIONS.items():
        update = exact.expected_update(tree, now, correction)
        variance = enumeration.update_variance(tree, now, correction, baseline, 1.0)
        rows.append((name, np.linalg.norm(update - gradient) / unit, np.sqrt(variance / 256) / unit))
    return pl.DataFrame(rows, schema=["correction", "bias", "noise"], orient="row")


# %% [markdown]
# Under a discrepancy of sd .3 alone, sequence weights are unbiased and the noisiest; PPO's clip, which takes the
# discrepancy for progress, is the most biased and the quietest. DLC's centring removes a tenth of the bias, token
# weights a quarter. Under a lag of that size alone DLC is token TIS to a part in a thousand: without a discrepancy the
# weights are the same, and the centred score differs from the plain one only where the cap binds.

# %%
numerics, stale = tradeoff(0.3, 0.0), tradeoff(0.0, 0.3)
print(numerics.join(stale, on="correction", suffix=" (lag)"))


def bias_of(table: pl.DataFrame, name: str) -> float:
    return table.filter(correction=name)["bias"][0]


for table in (numerics, stale):
    assert bias_of(table, "seq_is") < 1e-12
    assert table.sort("bias")["correction"][-1] == "ppo"
    assert table.sort("noise")["correction"][0] == "ppo"
    assert bias_of(table, "tis") < bias_of(table, "none")
assert numerics.sort("noise")["correction"][-1] == "seq_is"
assert 0.85 < bias_of(numerics, "dlc") / bias_of(numerics, "none") < 0.95
assert np.isclose(bias_of(stale, "dlc"), bias_of(stale, "tis"), rtol=1e-3)

# %% [markdown]
# ## Where training goes
#
# Phase map: discrepancy to the right, staleness (updates between two syncs) upward; the colour is how far 60 updates of
# training end from on-policy training, KL(on-policy || this) of whole sequences, in units of the KL between two
# independent on-policy trainings. Two runs a cell, the same seeds in each. White: two units, what claim C6 allows.

# %%
start = np.zeros(tree.shape)
offsets, periods, names = (0.0, 0.05, 0.1, 0.2, 0.4), (1, 2, 4, 8, 16, 40), ("none", "tis", "dlc", "seq_tis")


def final(correction: str, sd: float, every: int, seed: int) -> np.ndarray:
    config = simulate.SimConfig(
        CORRECTIONS[correction], EveryK(every), ConstantOffset(sd), steps=40, seed=seed, readings=False
    )
    return simulate.run(tree, start, config, range(2)).state.policies.train


on_policy = final("none", 0.0, 1, seed=0)
unit = float(exact.kl(tree, on_policy, final("none", 0.0, 1, seed=1)).mean())
rows = [
    (name, sd, every, float(exact.kl(tree, on_policy, final(name, sd, every, seed=0)).mean()) / unit)
    for name in names
    for sd in offsets
    for every in periods
]
phases = pl.DataFrame(rows, schema=["correction", "discrepancy", "staleness", "kl"], orient="row")
figure, axes = plt.subplots(1, 4, figsize=(14, 3.8), layout="constrained", sharey=True)
for ax, name in zip(axes, names, strict=True):
    image = plots.phase_map(ax, phases.filter(correction=name))
    ax.set_title(plots.label(name), fontsize=10)
figure.colorbar(image, ax=axes, label="KL from on-policy, in units of the on-policy pair's")

# %% [markdown]
# On-policy and exact is the lower left corner. Moving right (discrepancy) or up (staleness) leaves it; how fast depends
# on the correction.

# %%
at = {(row[0], row[1], row[2]): row[3] for row in rows}
assert all(at[name, 0.0, 1] < 1e-9 for name in names)
assert at["none", 0.4, 1] > at["tis", 0.4, 1] > at["seq_tis", 0.4, 1]
assert all(at[name, 0.0, 40] > 3 for name in names)

# %% [markdown]
# Bias against noise, every correction at once: move the two sources. Lower left is better; on the dotted lines the mean
# square error of one batch is the same.


# %%
def draw(discrepancy: float, lag: float) -> Figure:
    figure = Figure(figsize=(6, 4.2), layout="constrained")
    theory_plots.bias_against_noise(figure.subplots(), tradeoff(discrepancy, lag))
    return figure


draw(0.3, 0.3)

# %%
explore(
    draw,
    discrepancy=ipywidgets.FloatSlider(0.3, min=0.0, max=1.0, step=0.05, description="sd of d"),
    lag=ipywidgets.FloatSlider(0.3, min=0.0, max=1.0, step=0.05, description="lag"),
)
