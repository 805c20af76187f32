"""Figures of the theory on tabular policies: `fn(ax, table, ...) -> ax`, in the colours and names of `plots.py`."""

import math
from collections.abc import Mapping, Sequence

import matplotlib
import numpy as np
import polars as pl
from matplotlib.axes import Axes

from sandbox.output.plots import PARTS, SINCE, STYLES, VARIANCE, label, level
from sandbox.theory import delay


def bias_by_horizon(ax: Axes, table: pl.DataFrame) -> Axes:
    """The four parts of a discrepancy's bias and what corrections leave of it, against the length of a response.

    Args:
        table: of `bias.by_horizon`.
    """
    for part, style in PARTS.items():
        ax.plot(table["horizon"], table[part] / table["gradient"], label=part.replace("_", " "), **style)
    for name, column in (("none", "total"), ("dlc", "left_by_dlc"), ("tis", "left_by_tis")):
        left = table[column] / table["gradient"]
        ax.plot(table["horizon"], left, marker="o", markersize=4, label=f"left by {label(name)}", **STYLES[name])
    ax.set(xlabel="tokens a response, T", ylabel="norm, in units of the gradient's", xscale="log", ylim=(0, None))
    ax.legend(fontsize=8, ncols=2)
    return ax


def bias_parts(ax: Axes, parts: Mapping[str, float], left: Mapping[str, float]) -> Axes:
    """First-order parts of a bias as bars, the exact bias that each correction leaves as points; norms in a unit."""
    for place, (part, size) in enumerate(parts.items()):
        ax.bar(place, size, color=PARTS[part]["color"], width=0.7)
    for place, (correction, size) in enumerate(left.items(), len(parts)):
        ax.plot([place], [size], "o", color=STYLES[correction]["color"], markersize=9)
        ax.vlines(place, 0, size, **STYLES[correction])
    names = [part.replace("_", "\n") for part in parts] + [f"left by\n{label(c)}" for c in left]
    ax.set_xticks(range(len(names)), names, fontsize=8)
    ax.set(ylabel="norm, in units of the gradient's", ylim=(0, None))
    return ax


def lag_growth(ax: Axes, table: pl.DataFrame) -> Axes:
    """Size of the lag of the uncorrected run, predicted and measured, and of the exactly corrected one.

    Args:
        table: of `lag.LoopEffect`.
    """
    ax.plot(table["k"], table["lag_none"], label=label("none"), **STYLES["none"])
    ax.plot(table["k"], table["predicted"], color=STYLES["none"]["color"], linestyle=":", label="predicted")
    ax.plot(table["k"], table["lag_exact"], label="sequence IS, exact", **STYLES["seq_is"])
    ax.set(xlabel=SINCE, ylabel="size of the lag (norm of the logits' change)")
    ax.legend(fontsize=8)
    return ax


def delayed_loop(ax: Axes, path: np.ndarray) -> Axes:
    """A disturbance of size 1 under a delayed loop, updates 0 to K, (K + 1,); off the scale it is cut at 3."""
    ax.axhline(0, color="0.7", linewidth=0.8)
    ax.plot(range(len(path)), path, color="#0072B2", linewidth=1.6)
    ax.set(xlabel="optimiser updates", ylabel="weights' distance from the fixed point", ylim=(-3, 3))
    return ax


def stability(ax: Axes, tau: int, gain: float) -> Axes:
    """Critical gain against staleness (H = 0, M = -kappa), and where one loop stands."""
    staleness = np.arange(0, max(17, tau + 2))
    critical = [delay.critical_gain(t) for t in staleness.tolist()]
    ax.fill_between(staleness, critical, color="#009E73", alpha=0.15, linewidth=0)
    ax.plot(staleness, critical, color="#009E73", marker="o", markersize=4)
    stable = gain < delay.critical_gain(tau)
    ax.plot([tau], [gain], "D", color="#0072B2" if stable else "#D55E00", markersize=9)
    radius = delay.spectral_radius(0.0, -1.0, gain, tau)
    verdict = "shrinks" if stable else "grows"
    ax.set_title(f"{verdict} by {abs(radius - 1):.1%} an update (factor {radius:.3f})", fontsize=10)
    ax.text(0.97, 0.9, "stable below the line", ha="right", fontsize=8, transform=ax.transAxes)
    ax.set(xlabel="staleness tau (updates)", ylabel="loop gain eta kappa", ylim=(0, 2.3))
    return ax


def worth(ax: Axes, ess: np.ndarray, efficiency: np.ndarray) -> Axes:
    """What a stale batch is worth (on-policy variance over its own) against its sequence ESS. (n,) each"""
    ax.plot([0, 1], [0, 1], color="0.6", linewidth=0.8)
    ax.plot(ess, efficiency, "o-", color="#0072B2", markersize=4)
    ax.set(xlabel="sequence ESS (fraction of n)", ylabel="variance, on-policy over weighted")
    ax.set(xlim=(0, 1), ylim=(0, 1.05))
    return ax


def ess_by_length(ax: Axes, lengths: Sequence[int], ess: Sequence[float], token_kl: Sequence[float]) -> Axes:
    """Sequence ESS against the length of a response, and the token KL, which does not see it, in the title."""
    ax.axhline(0.5, color="0.4", linewidth=0.8)
    ax.plot(lengths, ess, "o-", color="#0072B2", markersize=4)
    ax.set_title(f"token KL {min(token_kl):.2g} to {max(token_kl):.2g} nats, at every length", fontsize=10)
    ax.set(xlabel="tokens a response, T", ylabel="sequence ESS (fraction of n)", xscale="log", ylim=(0, 1.05))
    return ax


def sync_price(ax: Axes, reached: pl.DataFrame) -> Axes:
    """Return at the end of a budget against the ESS threshold, one line a cost of a sync, the best one marked.

    Args:
        reached: of `staleness.at_budget`.
    """
    by_ess = reached.filter(pl.col("rule") == "threshold").sort("cost", "value")
    shades = matplotlib.colormaps["viridis"](np.linspace(0.05, 0.85, by_ess["cost"].n_unique()))
    for shade, (cost, table) in zip(shades, by_ess.group_by("cost", maintain_order=True), strict=True):
        ax.plot(table["value"], table["return"], color=shade, label=f"{cost[0]:g} updates")
        best = table.row(int(table["return"].arg_max()), named=True)  # type: ignore[arg-type]
        ax.plot([best["value"]], [best["return"]], "o", color=shade, markersize=6)
    ax.axvline(0.5, color="0.4", linewidth=0.8)
    ax.set(xlabel="ESS threshold of the resync rule", ylabel="return when the budget is spent")
    ax.legend(fontsize=8, title="a sync costs", title_fontsize=8)
    return ax


def prediction_levels(ax: Axes, levels: Mapping[str, tuple[np.ndarray, float]]) -> Axes:
    """Var[log w] at k = 1 .. K by each level of prediction, with its ess_step in the legend (inf: none). (K,) each"""
    for (name, (curve, step)), style in zip(levels.items(), (":", "--", "-"), strict=True):
        says = f"{step:.0f}" if math.isfinite(step) else "none"
        ax.plot(np.arange(1, len(curve) + 1), curve, style, color="#0072B2", label=f"{name}: ess_step {says}")
    level(ax, math.log(2), "ESS = 1/2")
    ax.set(xlabel=SINCE, ylabel=VARIANCE, ylim=(0, 2))
    ax.legend(fontsize=8)
    return ax


def bias_against_noise(ax: Axes, table: pl.DataFrame) -> Axes:
    """One point a correction: bias of its update against the noise of a batch, both in units of the gradient.

    Args:
        table: columns correction, bias, noise.
    """
    right, top = 1.5 * float(table["noise"].max()), 1.1 * max(float(table["bias"].max()), 0.05)  # type: ignore[arg-type]
    free = -math.inf  # names stand in a column, one above the other, with a line to their point
    for correction, bias, noise in table.sort("bias").select("correction", "bias", "noise").iter_rows():
        free = max(bias, free + 0.055 * top)
        ax.plot([noise, 0.8 * right], [bias, free], color="0.8", linewidth=0.6, zorder=0)
        ax.plot([noise], [bias], "o", color=STYLES[correction]["color"], markersize=8, markeredgecolor="0.3")
        ax.text(0.81 * right, free, label(correction), fontsize=8, va="center")
    angle = np.linspace(0, np.pi / 2, 60)
    for radius in np.linspace(0, np.hypot(right, top), 7)[1:]:
        ax.plot(radius * np.sin(angle), radius * np.cos(angle), ":", color="0.8", linewidth=0.8, zorder=0)
    ax.set(xlabel="noise of a batch of 256 (units of the gradient)", ylabel="bias (units of the gradient)")
    ax.set(xlim=(0, right), ylim=(-0.02 * top, top))
    return ax
