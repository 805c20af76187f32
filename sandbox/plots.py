"""Figures: `fn(ax, table, ...) -> ax`, one colour, dash and name per correction across the whole project.

The colours are Okabe and Ito's, told apart by colour-blind readers; the dashes tell them apart in grey.
"""

import io
import math
from collections.abc import Iterable, Mapping, Sequence

import matplotlib
import numpy as np
import polars as pl
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.image import AxesImage

from sandbox import delay

STYLES: dict[str, dict] = {
    "on-policy": {"color": "#555555", "linestyle": "-"},
    "none": {"color": "#D55E00", "linestyle": "-"},
    "tis": {"color": "#0072B2", "linestyle": "--"},
    "seq_tis": {"color": "#56B4E9", "linestyle": "--"},
    "seq_is": {"color": "#CC79A7", "linestyle": (0, (1, 1))},
    "mis": {"color": "#E69F00", "linestyle": "-."},
    "seq_mis": {"color": "#F0E442", "linestyle": "-."},
    "icepop": {"color": "#000000", "linestyle": ":"},
    "ppo": {"color": "#882255", "linestyle": (0, (5, 1, 1, 1))},
    "cis": {"color": "#44AA99", "linestyle": (0, (3, 1))},
    "dlc": {"color": "#009E73", "linestyle": (0, (6, 1.5))},
}
PARTS: dict[str, dict] = {  # of a bias; tints of grey and blue, as they are no corrections
    "leading": {"color": "#222222", "linestyle": "-"},
    "within_token": {"color": "#777777", "linestyle": "--"},
    "prefix": {"color": "#3b528b", "linestyle": "-."},
    "downstream": {"color": "#9aa8d4", "linestyle": ":"},
}
LABELS = {
    "none": "uncorrected",
    "tis": "token TIS",
    "seq_tis": "sequence TIS",
    "seq_is": "sequence IS",
    "mis": "token MIS",
    "seq_mis": "sequence MIS",
    "icepop": "IcePop",
    "ppo": "PPO clip",
    "cis": "CIS",
    "dlc": "DLC",
}


def label(correction: str) -> str:
    """The name of a correction in legends and tables."""
    return LABELS.get(correction, correction)


def ess_curves(ax: Axes, tables: Mapping[str, pl.DataFrame], threshold: float = 0.5) -> Axes:
    """Sequence ESS of the lag against updates, with threshold and sync marks.

    Args:
        tables: correction -> columns step, ess; optional low and high (a band) and synced.
    """
    ax.axhline(threshold, color="0.4", linewidth=0.8)
    ax.text(0.99, threshold + 0.01, f"ESS = {threshold:g}", ha="right", va="bottom", fontsize=7, transform=_across(ax))
    for correction, table in tables.items():
        style = STYLES[correction]
        ax.plot(table["step"], table["ess"], label=label(correction), linewidth=1.6, **style)
        if "low" in table.columns:
            ax.fill_between(table["step"], table["low"], table["high"], color=style["color"], alpha=0.15, linewidth=0)
        if "synced" in table.columns:
            at = table.filter(pl.col("synced"))["step"]
            ax.plot(at, [1.03] * len(at), "|", color=style["color"], markersize=7)
    ax.set(xlabel="optimiser updates", ylabel="sequence ESS of the lag (fraction of n)", ylim=(0, 1.07))
    return ax


def prediction_marks(ax: Axes, predicted: Mapping[str, float], threshold: float = 0.5) -> Axes:
    """A triangle at the predicted ess_step of each correction, on the threshold line of `ess_curves`."""
    for correction, step in predicted.items():
        if math.isfinite(step):
            color = STYLES[correction]["color"]
            ax.plot([step], [threshold], "v", color=color, markeredgecolor="white", markersize=9, zorder=5)
    ax.plot([], [], "v", color="0.3", markersize=7, label="predicted ess_step")
    return ax


def value_curves(ax: Axes, tables: Iterable[tuple[str, pl.DataFrame]], column: str, ylabel: str) -> Axes:
    """One line a run of `column` (of its mean, where it holds lists) against updates; runs may share a correction.

    A band where the table has columns `column`_low and `column`_high.
    """
    named = set()
    for correction, table in tables:
        values = table[column].list.mean() if table[column].dtype == pl.List else table[column]
        name = None if correction in named else label(correction)
        ax.plot(table["step"], values, label=name, linewidth=1.6, **STYLES[correction])
        if f"{column}_low" in table.columns:
            low, high, color = table[f"{column}_low"], table[f"{column}_high"], STYLES[correction]["color"]
            ax.fill_between(table["step"], low, high, color=color, alpha=0.15, linewidth=0)
        named.add(correction)
    ax.set(xlabel="optimiser updates", ylabel=ylabel)
    return ax


def decomposition(ax: Axes, tables: Mapping[str, pl.DataFrame]) -> Axes:
    """RMS per token of discrepancy d (dotted) and lag g (the correction's own dash), log scale.

    Args:
        tables: correction -> columns step, discrepancy, lag (mean squares per token, nats^2).
    """
    for correction, table in tables.items():
        table = table.drop_nulls("lag")
        color = STYLES[correction]["color"]
        # 0 (no lag right after a sync) has no place on a log axis
        lag = [math.sqrt(g) if g > 0 else math.nan for g in table["lag"]]
        ax.plot(table["step"], lag, label=f"lag g, {label(correction)}", linewidth=1.6, **STYLES[correction])
        ax.plot(table["step"], table["discrepancy"].sqrt(), color=color, linestyle=":", linewidth=1.2)
    ax.plot([], [], color="0.3", linestyle=":", label="discrepancy d")
    ax.set(xlabel="optimiser updates", ylabel="RMS per token (nats)", yscale="log")
    return ax


def variance_fit(
    ax: Axes, tables: Mapping[str, pl.DataFrame], fits: Mapping[str, tuple[float, float]], used: float
) -> Axes:
    """Var[log r] against updates since the sync, the fitted a k^2 + b k, ln 2, and the largest value that was fitted.

    Args:
        tables: correction -> columns k, var_log_ratio.
        fits: correction -> (a, b).
        used: points at or below this value were fitted; the rest is prediction.
    """
    for correction, table in tables.items():
        table = table.filter(pl.col("var_log_ratio") > 0)
        style = STYLES[correction]
        ax.plot(table["k"], table["var_log_ratio"], "o", markersize=3, color=style["color"], label=label(correction))
        if correction in fits and len(table):
            a, b = fits[correction]
            ax.plot(table["k"], a * table["k"] ** 2 + b * table["k"], linewidth=1.2, **style)
    for value, name in ((math.log(2), "ln 2"), (used, "fitted below")):
        ax.axhline(value, color="0.4", linewidth=0.8)
        ax.text(0.99, value, name, ha="right", va="bottom", fontsize=7, transform=_across(ax))
    ax.set(
        xlabel="updates since the sync, k",
        ylabel="Var of the sequence log lag ratio (nats²)",
        xscale="log",
        yscale="log",
    )
    return ax


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
    ax.set(xlabel="updates since the sync, k", ylabel="size of the lag (norm of the logits' change)")
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
    ax.set(
        xlabel="sequence ESS (fraction of n)", ylabel="variance, on-policy over weighted", xlim=(0, 1), ylim=(0, 1.05)
    )
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
    """Var[log w] at k = 1 .. K by each level of prediction, with its ess_step in the legend (inf: none)."""
    for (name, (curve, step)), style in zip(levels.items(), (":", "--", "-"), strict=True):
        says = f"{step:.0f}" if math.isfinite(step) else "none"
        ax.plot(np.arange(1, len(curve) + 1), curve, style, color="#0072B2", label=f"{name}: ess_step {says}")
    ax.axhline(math.log(2), color="0.4", linewidth=0.8)
    ax.text(0.99, math.log(2), "ESS = 1/2", ha="right", va="bottom", fontsize=7, transform=_across(ax))
    ax.set(xlabel="updates since the sync, k", ylabel="Var of the sequence log lag ratio (nats²)", ylim=(0, 2))
    ax.legend(fontsize=8)
    return ax


def phase_map(ax: Axes, table: pl.DataFrame, most: float = 100.0) -> AxesImage:
    """How far from on-policy one correction's training ends, by both sources; the image, for a colour bar.

    Args:
        table: a row a cell of the grid: discrepancy (sd, nats), staleness (updates between syncs), kl (in units of the
            on-policy pair's).
        most: end of the colour scale, logarithmic from .1; the line is where kl = 2, the bound of claim C6.
    """
    grid = table.pivot("discrepancy", index="staleness", values="kl").sort("staleness")
    across, up = [float(x) for x in grid.columns[1:]], grid["staleness"].to_list()
    cells = grid.drop("staleness").to_numpy()
    image = ax.imshow(np.clip(cells, 0.1, None), origin="lower", aspect="auto", cmap="cividis", norm=LogNorm(0.1, most))
    if cells.min() < 2 < cells.max():
        ax.contour(cells, levels=[2.0], colors="white", linewidths=1.2)
    ax.set_xticks(range(len(across)), [f"{x:g}" for x in across])
    ax.set_yticks(range(len(up)), [f"{x:g}" for x in up])
    ax.set(xlabel="discrepancy, sd (nats)", ylabel="updates between syncs")
    return image


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


def prediction(curve: list[dict], threshold: float) -> str:
    """Var[log w] of every level, or measured and fitted, against updates since the sync; an SVG element.

    Args:
        curve: rows of k and any of closed_form, linearised, mean_field, var_log_ratio, fit, curved.
        threshold: ESS; its Var is ln(1 / threshold).
    """
    table, figure = pl.DataFrame(curve), Figure(figsize=(5, 3.4), layout="constrained")
    ax = figure.subplots()
    marks = {
        "closed_form": ":",
        "linearised": "--",
        "mean_field": "-",
        "var_log_ratio": "o",
        "fit": "-",
        "curved": "--",
    }
    for name, mark in marks.items():
        if name in table.columns:
            shown = table.filter(pl.col(name) > 0)
            ax.plot(shown["k"], shown[name], mark, markersize=3, linewidth=1.4, label=name.replace("_", " "))
    ax.axhline(-math.log(threshold), color="0.4", linewidth=0.8)
    text = f"ESS = {threshold:g}"
    ax.text(0.99, -math.log(threshold), text, ha="right", va="bottom", fontsize=7, transform=_across(ax))
    ax.set(xlabel="updates since the sync, k", ylabel="Var of the sequence log lag ratio (nats²)")
    ax.set(xscale="log", yscale="log")
    ax.legend(fontsize=8)
    return svg(figure)


def svg(figure: Figure) -> str:
    """The figure as an SVG element, to stand inside a page."""
    with matplotlib.rc_context({"svg.hashsalt": "mismatch"}):
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    text = buffer.getvalue()
    return text[text.index("<svg") :]


def _across(ax: Axes):
    return ax.get_yaxis_transform()  # x in the axes, y in data
