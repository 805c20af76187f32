"""What `mismatch diagnose` shows: the page for a terminal, and report.html with its figures."""

from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from realmodel import readers
from sandbox import diagnose, plots, report, results, rollouts
from sandbox.errors import BadInput


def run(
    dumps: tuple[Path, ...], format: str | None, columns: tuple[str, ...], lag: int | None, trust_pickle: bool
) -> tuple[dict[str, Any], rollouts.Rollouts]:
    """Read and diagnose. Raises BadInput for bad options, or where no row can be analysed."""
    if not dumps:
        raise BadInput("dump: give at least one file or folder")
    if lag is not None and lag < 0:
        raise BadInput(f"lag is {lag}, expected 0 or more versions")
    pairs = [column.partition("=") for column in columns]
    for name, equals, theirs in pairs:
        if not (name and equals and theirs):
            raise BadInput(f"map is {name + equals + theirs!r}, expected canonical=theirs")
    rows = readers.read(dumps, format, {name: theirs for name, _, theirs in pairs}, trust_pickle)
    table = rollouts.collect(rows, lag)
    return diagnose.diagnose(table), table


def save(folder: Path, asked: dict[str, Any], outcome: dict[str, Any], table: rollouts.Rollouts) -> None:
    """diagnosis.json and report.html in a new run folder."""
    results.create_run(folder, asked)
    results.write_json(folder / "diagnosis.json", outcome)
    results.write_text(folder / "report.html", page(outcome, table))
    results.finish_run(folder)


def tables(outcome: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """The tables of the terminal page; every number with unit, stage and n in its name or row."""
    ess = [
        {
            "unit": unit,
            "stage": "raw",
            "ESS": e["raw"],
            "n": e["n"],
            "90% interval": e["interval"],
            "Pareto k": e["pareto_k"],
        }
        for unit, e in outcome["ess"].items()
    ]
    names = ("discrepancy", "lag", "cross_term", "total", "lag_share")
    split = [{"mean_square_per_token_nats2": "trainer - sampler"} | {name: outcome[name] for name in names}]
    pages = {f"VERDICT: {outcome['verdict']}": [{"advice": line} for line in outcome["advice"]] or [{"advice": "-"}]}
    if outcome["findings"]:
        found = [{name: f[name] for name in ("code", "severity", "message")} for f in outcome["findings"]]
        pages["findings"] = found
    pages[f"split of the token error, n = {outcome['n_tokens']} tokens ({outcome['split_from']})"] = split
    pages["effective sample size, a fraction of n"] = ess
    kl = outcome["kl_sampler_train"]
    pages["KL(sampler || trainer), nats a token"] = [kl | outcome["reference_level"]["position"]]
    if outcome["corrections"]:
        pages["corrections on this dump's ratios, best first"] = outcome["corrections"]
    if outcome["refused"]:
        pages[f"refused: {len(outcome['refused'])} rows or parts of rows; the first"] = outcome["refused"][:5]
    return pages


def page(outcome: dict[str, Any], table: rollouts.Rollouts) -> str:
    """report.html, self-contained."""
    sections = [report.Section(title, (), report.aligned(rows)) for title, rows in tables(outcome).items()]
    sections += [report.Section(title, (text,), (), figure) for title, text, figure in figures(outcome, table)]
    return report.render("Diagnosis of a dump", sections, results.foot())


def figures(outcome: dict[str, Any], table: rollouts.Rollouts) -> list[tuple[str, str, str]]:
    """(heading, what it shows, SVG): split and ESS over steps, log ratios with tails, position profile."""
    drawn = []
    steps = outcome["by_step"]
    if len(steps) > 1:
        x = [row["step"] for row in steps]
        figure = Figure(figsize=(7, 3), layout="constrained")
        ax = figure.subplots()
        for name in ("discrepancy", "lag"):
            if outcome["identifiable"]:
                ax.plot(x, [row[name] for row in steps], label=name)
        ax.plot(x, [row["kl_sampler_train_k3"] for row in steps], label="k3, KL(sampler || trainer)", ls=":")
        ax.set(xlabel="step", ylabel="mean square, nats²; k3, nats")
        ax.legend()
        drawn.append(("The split over steps", "Per token, trainer minus sampler, raw.", plots.svg(figure)))
        figure = Figure(figsize=(7, 3), layout="constrained")
        ax = figure.subplots()
        low, high = np.array([row["ess_interval"] for row in steps], float).T
        ax.fill_between(x, low, high, alpha=0.3)
        ax.plot(x, [row["ess"] for row in steps], label="sequence ESS, raw")
        ax.axhline(0.5, color="k", lw=0.8, ls="--", label="1/2")
        predicted = outcome["collapse_prediction"]["ess_step"]
        if np.isfinite(predicted):
            ax.set_title(f"predicted ess_step: {predicted:.0f} updates after a sync")
        ax.set(xlabel="step", ylabel="fraction of n", ylim=(0, 1.05))
        ax.legend()
        drawn.append(("ESS by step", "With its 90% bootstrap interval; small samples flatter it.", plots.svg(figure)))
    t = (table.logp_train - table.logp_rollout)[table.mask]
    t = t[np.isfinite(t)]
    figure = Figure(figsize=(7, 3), layout="constrained")
    ax = figure.subplots()
    if len(t):
        ax.hist(t, bins=100, log=True)
    ax.set(xlabel="log π - log q, nats", ylabel="tokens")
    drawn.append(("Log ratios with their tails", f"Raw, n = {len(t)} tokens.", plots.svg(figure)))
    position = np.arange(len(table.mask)) - np.repeat(table.starts[:-1], np.diff(table.starts))
    every = np.where(table.mask, table.logp_train - table.logp_rollout, 0.0)
    bins = np.minimum(position * 50 // max(int(position.max()) + 1, 50), 49)
    n = np.bincount(bins[table.mask], minlength=50)
    square = np.bincount(bins[table.mask], np.minimum(every[table.mask] ** 2, 1e4), minlength=50)
    figure = Figure(figsize=(7, 3), layout="constrained")
    ax = figure.subplots()
    ax.plot(np.flatnonzero(n) * max(int(position.max()) + 1, 50) / 50, (square / np.maximum(n, 1))[n > 0])
    ax.set(xlabel="position in the row, tokens", ylabel="mean t², nats²")
    drawn.append(("Profile by position", f"Raw, n = {int(table.mask.sum())} tokens.", plots.svg(figure)))
    return drawn
