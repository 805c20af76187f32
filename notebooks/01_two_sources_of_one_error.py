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
# # Two sources of one error
#
# The sampler draws from q, the trainer computes gradients under pi. Per token the error is t = log pi - log q. It has
# two sources: the engine's numerics, d = log mu - log q, and the sampler's stale weights, g = log pi - log mu, where mu
# is the trainer's engine at the sampler's weights. On a tabular policy both are known exactly.

# %%
import matplotlib.pyplot as plt
import numpy as np

from sandbox.corrections import EveryK
from sandbox.output import plots
from sandbox.tabular import exact, problems, simulate
from sandbox.tabular.policy import ConstantOffset, policies

problem = problems.sparse_tree(np.random.default_rng(0))
start = np.zeros(problem.shape)

# %% [markdown]
# Train for 40 updates with a sampler that never syncs and whose engine adds a constant offset of 0.1 nats to its
# log-probabilities, and read both sources at the end.

# %%
config = simulate.SimConfig(discrepancy=ConstantOffset(0.1), steps=40, seed=1)
stale = simulate.run(problem, start, config, runs=range(4))
pi, mu, q = (table[0] for table in stale.state.policies)
d, g, t = mu - q, pi - mu, pi - q
np.testing.assert_allclose(t, d + g, atol=1e-12)  # the identity is exact

# %% [markdown]
# The discrepancy is what it was before the first update; the lag is not.

# %%
before = policies(start, start, stale.state.log_offset[0])
assert np.allclose(before.sync - before.rollout, d)
assert np.all(before.train == before.sync)
assert np.abs(g).max() > 3 * np.abs(d).max()

# %% [markdown]
# Syncing removes the lag and leaves the discrepancy. Sequence ESS of either source alone, and of both:

# %%
report = exact.report(problem, policies(stale.state.trainer[0], stale.state.sampler[0], stale.state.log_offset[0]))
print({name: round(float(value), 3) for name, value in report.ess.items()})
synced = simulate.run(problem, start, simulate.SimConfig(**{**config.__dict__, "resync": EveryK(1)}), runs=range(4))
assert report.ess["lag"] < 0.5 < report.ess["discrepancy"]
assert synced.table["ess"][0] > 0.99  # one update behind, never more

# %%
tables = {"none": stale.table.filter(run=0), "on-policy": synced.table.filter(run=0)}
figure, axes = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
plots.ess_curves(axes[0], tables)
plots.value_curves(axes[1], tables.items(), "return", "return")
for ax in axes:
    ax.legend(fontsize=8)
