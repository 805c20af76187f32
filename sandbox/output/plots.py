"""Figures: `fn(ax, table, ...) -> ax`, one colour, dash and name per correction across the whole project.

The colours are Okabe and Ito's, told apart by colour-blind readers; the dashes tell them apart in grey.
"""

import io
import math
from collections.abc import Iterable, Mapping

import matplotlib
import numpy as np
import polars as pl
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.image import AxesImage

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
SINCE, VARIANCE = "updates since the sync, k", "Var of the sequence log lag ratio (nats²)"  # axes
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
    level(ax, threshold, f"ESS = {threshold:g}")
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
        level(ax, value, name)
    ax.set(xlabel=SINCE, ylabel=VARIANCE, xscale="log", yscale="log")
    return ax


def predicted_against_observed(ax: Axes, table: pl.DataFrame, horizon: float) -> Axes:
    """ess_step predicted against observed, one point a run, with the identity line; what does not come is at the rim.

    Args:
        table: columns correction, predicted, observed (updates, inf for none within the horizon), where (marker's
            meaning, such as "fit of a real run").
        horizon: end of the axes, updates.
    """
    rim = 1.25 * horizon
    ax.plot([1, rim], [1, rim], color="0.6", linewidth=0.8)
    ax.fill_between([1, rim], [0.75, 0.75 * rim], [1.25, 1.25 * rim], color="0.6", alpha=0.12, linewidth=0)
    for (correction, where), rows in table.group_by("correction", "where", maintain_order=True):
        marker = "os^D"[table["where"].unique(maintain_order=True).to_list().index(where)]
        x, y = (rows[name].clip(1, rim) for name in ("observed", "predicted"))
        color = STYLES[str(correction)]["color"]
        face = color if marker == "o" else "none"
        ax.plot(x, y, marker, color=color, markerfacecolor=face, label=f"{label(str(correction))}, {where}", alpha=0.8)
    ax.set(xscale="log", yscale="log", xlim=(1, 1.1 * rim), ylim=(1, 1.1 * rim))
    ticks = [t for t in (1, 2, 5, 10, 20, 50, 100, 200) if t < 0.9 * rim]
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_ticks([*ticks, rim], [*map(str, ticks), "none"])
        axis.set_ticks([], minor=True)
    ax.set(xlabel="observed ess_step (updates since the sync)", ylabel="predicted ess_step")
    if len(table):
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


def phase_maps(cells: pl.DataFrame) -> Figure | None:
    """One `phase_map` a correction, of the first problem and step size of a sweep; None where that is no map.

    Args:
        cells: of `sweep.summary`; rows without a fixed period are left out.
    """
    first = cells.head(1).select("problem", "step_size")
    shown = cells.join(first, on=["problem", "step_size"]).drop_nulls("staleness")
    if min(shown[axis].n_unique() for axis in ("discrepancy", "staleness")) < 2:
        return None
    names = shown["correction"].unique(maintain_order=True).to_list()
    figure = Figure(figsize=(1.2 + 3.2 * len(names), 3.6), layout="constrained")
    panels = figure.subplots(1, len(names), squeeze=False)[0]
    for ax, name in zip(panels, names, strict=True):
        image = phase_map(ax, shown.filter(pl.col("correction") == name))
        ax.set_title(label(name), fontsize=10)
    figure.colorbar(image, ax=panels, label="KL from on-policy, in units of the pair's")
    return figure


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
    level(ax, -math.log(threshold), f"ESS = {threshold:g}")
    ax.set(xlabel=SINCE, ylabel=VARIANCE, xscale="log", yscale="log")
    ax.legend(fontsize=8)
    return svg(figure)


def svg(figure: Figure) -> str:
    """The figure as an SVG element, to stand inside a page."""
    with matplotlib.rc_context({"svg.hashsalt": "mismatch"}):
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    text = buffer.getvalue()
    return text[text.index("<svg") :]


def level(ax: Axes, y: float, name: str) -> None:
    """A thin line across the axes at y, with its name at the right end."""
    ax.axhline(y, color="0.4", linewidth=0.8)
    ax.text(0.99, y, name, ha="right", va="bottom", fontsize=7, transform=ax.get_yaxis_transform())
