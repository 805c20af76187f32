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
# # The discrepancy's bias, and what centring removes
#
# The engine's numerics make the sampler draw from q = mu exp(-d) instead of mu. With fresh weights (no lag) the update
# of an uncorrected batch is then off the gradient by a fixed amount. To first order in d that bias is a sum of four
# vectors, by which token's d meets which token's score. All of it is exact here: recursions over states, no sampling.

# %%
import ipywidgets
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.figure import Figure

from sandbox.corrections import CORRECTIONS
from sandbox.output import theory_plots
from sandbox.output.interactive import explore
from sandbox.tabular import bias, exact, problems
from sandbox.tabular.policy import log_policy, policies

machine = problems.state_machine(np.random.default_rng(0), 16, 4, 64)  # 16 states, 4 tokens, responses of 64 tokens
rng = np.random.default_rng(1)
weights, offset = 0.5 * rng.normal(size=machine.shape), rng.normal(size=machine.shape)

# %% [markdown]
# `offset` is what the engine adds to its log-probabilities, so d is minus the offset up to a constant per state. At a
# small size (sd .001 nats) the four parts add up to the whole bias of the exact update.

# %%
mu = log_policy(weights)
gradient = exact.gradient(machine, mu)


def biased(correction: str, sd: float) -> np.ndarray:
    """Update minus gradient at zero lag, of an engine whose offsets have this standard deviation."""
    three = policies(weights, weights, sd * offset)
    return exact.expected_update(machine, three, CORRECTIONS[correction]) - gradient


def distance(x: np.ndarray, y: np.ndarray) -> float:
    return float(np.linalg.norm(x - y) / np.linalg.norm(y))


parts = bias.split(machine, mu, -0.001 * offset)
assert distance(biased("none", 0.001), parts.total) < 0.01

# %% [markdown]
# **Token weights** remove two parts, what the token itself does. **Centring** the score at each prefix (DLC's way with
# the discrepancy) removes the leading part only. **Sequence weights** remove all four.

# %%
assert distance(biased("tis", 0.001), parts.prefix + parts.downstream) < 0.01
assert distance(biased("dlc", 0.001), parts.within_token + parts.prefix + parts.downstream) < 0.01
assert np.linalg.norm(biased("seq_is", 0.001)) < 1e-12

# %% [markdown]
# What centring leaves is not noise. With a centred score the update is the exact gradient of another target: the return
# of q, the policy that really samples, not of mu.

# %%
three = policies(weights, weights, 0.3 * offset)
centred = exact.expected_update(machine, three, CORRECTIONS["dlc"])
np.testing.assert_allclose(centred, exact.gradient(machine, three.rollout), atol=1e-12)

# %% [markdown]
# Is centring enough for long responses? Here reward comes with every token, and all four parts grow with the length
# like the gradient does: centring leaves more than nine tenths of the bias at every length, token weights about two
# thirds in long ones.

# %%
table = bias.by_horizon(machine, mu, -0.1 * offset, [2**k for k in range(11)])
figure, ax = plt.subplots(figsize=(6, 4), layout="constrained")
theory_plots.bias_by_horizon(ax, table)
longest = table.row(-1, named=True)
assert longest["left_by_dlc"] > 0.9 * longest["total"]
assert 0.6 < longest["left_by_tis"] / longest["total"] < 0.7

# %% [markdown]
# The parts are vectors and can cancel: on the sparse tree (a reward for the best tenth of 4^6 sequences), at this
# policy and with this offset, removing the leading part makes the remaining bias *longer*.

# %%
tree = problems.sparse_tree(np.random.default_rng(0))
rng = np.random.default_rng(1)
tree_weights, tree_offset = 0.5 * rng.normal(size=tree.shape), rng.normal(size=tree.shape)
tree_parts = bias.split(tree, log_policy(tree_weights), -0.1 * tree_offset)
left = {name: float(np.linalg.norm(tree_parts.left(kept))) for name, kept in bias.DISCREPANCY_LEFT.items()}
print({name: round(left[name] / left["none"], 3) for name in ("none", "dlc", "tis", "seq_is")})
assert left["dlc"] > left["none"] > left["tis"]

# %% [markdown]
# Move the size of the discrepancy and the length. Bars: the four parts, in units of the gradient. Dots: the exact bias
# that each correction leaves, caps and second-order terms included.


# %%
def draw(sd: float, tokens: int) -> Figure:
    problem = problems.state_machine(np.random.default_rng(0), 16, 4, tokens)
    unit = np.linalg.norm(exact.gradient(problem, mu))
    split = bias.split(problem, mu, -sd * offset)
    updates = exact.expected_updates(
        problem, policies(weights, weights, sd * offset), {name: CORRECTIONS[name] for name in ("none", "dlc", "tis")}
    )
    exact_bias = {name: np.linalg.norm(u - exact.gradient(problem, mu)) / unit for name, u in updates.items()}
    figure = Figure(figsize=(7, 3.4), layout="constrained")
    theory_plots.bias_parts(
        figure.subplots(), {p: float(np.linalg.norm(getattr(split, p)) / unit) for p in bias.PARTS}, exact_bias
    )
    return figure


draw(0.1, 64)

# %%
explore(
    draw,
    sd=ipywidgets.FloatSlider(0.1, min=0.0, max=0.5, step=0.02, description="sd of d"),
    tokens=ipywidgets.IntSlider(64, min=1, max=512, description="tokens"),
)
