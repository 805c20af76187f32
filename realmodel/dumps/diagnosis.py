"""What `mismatch diagnose` shows: the page for a terminal, and report.html with its figures."""

import math
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from realmodel.dumps import readers
from sandbox.diagnosis import diagnose, evidence
from sandbox.diagnosis.evidence import Evidence
from sandbox.errors import BadInput
from sandbox.output import plots, report, run_folder


def run(
    dumps: tuple[Path, ...], format: str | None, columns: tuple[str, ...], lag: int | None, trust_pickle: bool
) -> tuple[dict[str, Any], Evidence]:
    """Read and diagnose. Raises BadInput for bad options, or where no row was read."""
    if not dumps:
        raise BadInput("dump: give at least one file or folder")
    if lag is not None and lag < 0:
        raise BadInput(f"lag is {lag}, expected 0 or more versions")
    pairs = [column.partition("=") for column in columns]
    for name, equals, theirs in pairs:
        if not (name and equals and theirs):
            raise BadInput(f"map is {name + equals + theirs!r}, expected canonical=theirs")
    names = [name for name, _, _ in pairs]
    if len(set(names)) < len(names):
        raise BadInput("map: a canonical column is given twice")
    chunks = readers.read(dumps, format, {name: theirs for name, _, theirs in pairs}, lag, trust_pickle)
    collected = evidence.collect(chunks)
    return diagnose.outcome(collected), collected


def save(folder: Path, asked: dict[str, Any], outcome: dict[str, Any], collected: Evidence) -> None:
    """diagnosis.json and report.html in a new run folder."""
    run_folder.create_run(folder, asked)
    run_folder.write_json(folder / "diagnosis.json", outcome)
    sections = [report.Section(title, (), report.aligned(rows)) for title, rows in tables(outcome).items()]
    sections += [report.Section(title, (text,), (), figure) for title, text, figure in figures(outcome, collected)]
    run_folder.write_text(folder / "report.html", report.render("Diagnosis of a dump", sections, run_folder.foot()))
    run_folder.finish_run(folder)


def tables(outcome: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """The terminal page: verdict, what to do, what was found, the numbers, what was left out."""
    pages = {f"VERDICT: {outcome['verdict']}": [{"what to do": line} for line in outcome["advice"]]}
    if outcome["findings"]:
        found = [{"finding": f["code"], "severity": f["severity"], "what": f["message"]} for f in outcome["findings"]]
        pages["findings"] = sorted(found, key=lambda f: ("error", "warning", "info").index(f["severity"]))
    why = outcome["collapse_prediction"]["why"]
    pages["numbers" if why == "fitted" else f"numbers; ess_step is not predicted: {why}"] = numbers(outcome)
    if outcome["corrections"]:
        best = [
            {name: row[name] for name in ("correction", "bias", "noise", "error")} for row in outcome["corrections"][:5]
        ]
        pages["corrections on this dump's ratios: errors over that of a fresh batch, the least five"] = best
    counts = Counter(one["reason"] for one in outcome["refused"])
    if counts:
        first = {one["reason"]: one for one in reversed(outcome["refused"])}
        pages[f"left out, of {outcome['n_rows']} rows"] = [
            {"reason": reason, "rows": n, "first": f"{first[reason]['sample_id']}: {first[reason].get('detail', '')}"}
            for reason, n in counts.most_common()
        ]
    return pages


def numbers(outcome: dict[str, Any]) -> list[dict[str, Any]]:
    """A row a number: what, how much, its interval, its unit, of what, n. ESS and Pareto k say raw or their cap."""
    rows: list[dict[str, Any]] = []

    def add(what: str, value: Any, unit: str, of: str, n: int, within: Any = None) -> None:
        rows.append({"number": what, "value": value, "90 % interval": within, "unit": unit, "of": of, "n": n})

    split, tokens = outcome["n_tokens_split"], outcome["n_tokens"]
    add("discrepancy, mean d²", outcome["discrepancy"], "nats² a token", "log μ - log q", split)
    add("lag, mean g²", outcome["lag"], "nats² a token", "log π - log μ", split)
    add("cross term, 2 mean d g", outcome["cross_term"], "nats² a token", "d, g", split)
    add("total, mean t²", outcome["total"], "nats² a token", "log π - log q", tokens)
    add("lag share", outcome["lag_share"], "of d² + g²", f"by {outcome['identified_by']}", split)
    for name, value in outcome["kl_sampler_train"].items():
        add(f"KL, {name}", value, "nats a token", "KL(q || π)", tokens)
    for unit in ("sequence", "token"):
        size = outcome["ess"][unit]
        add(f"ESS, {unit}, raw", size["raw"], "of n", "π / q", size["n"], size["interval"])
        add(f"ESS, {unit}, cap {size['cap']:g}", size["truncated"], "of n", "π / q", size["n"])
        add(f"Pareto k, {unit}, raw", size["pareto_k"], f"limit {size['pareto_k_limit']:.2f}", "π / q", size["n"])
    stale, predicted = outcome["staleness"], outcome["collapse_prediction"]
    add("lag, mean", stale["mean"], "versions", "drawn to consumed", tokens)
    add("lag known", stale["coverage"], "of tokens", "drawn to consumed", tokens)
    ratio, points = predicted["of"].partition(" ")[0], sum(row["n"] for row in predicted["curve"])
    unknown = math.isnan(predicted["ess_step"])
    when, between = ("not predicted", None) if unknown else (predicted["ess_step"], predicted["interval"])
    add("ess_step, predicted", when, "updates since the sync", ratio, points, between)
    if math.isfinite(predicted["observed_ess_step"]):
        add("first lag, ESS below 1/2", predicted["observed_ess_step"], "updates since the sync", ratio, points)
    if math.isfinite(predicted["sync_period"]):
        add("sync period for ESS > 1/2", predicted["sync_period"], "updates", ratio, points)
    return rows


def figures(outcome: dict[str, Any], collected: Evidence) -> list[tuple[str, str, str]]:
    """(heading, what it shows, SVG): split and ESS over steps, the run's own curve, log ratios, position profile."""
    drawn = []
    steps = [row for row in outcome["by_step"] if row["step"] is not None]
    if len(steps) > 1:
        x = [row["step"] for row in steps]
        figure, ax = _axes("step", "mean square, nats²; k3, nats")
        for name in ("discrepancy", "lag", "total"):
            if not all(math.isnan(row[name]) for row in steps):
                ax.plot(x, [row[name] for row in steps], label=name)
        ax.plot(x, [row["kl_sampler_train_k3"] for row in steps], label="k3, KL(q || π)", ls=":")
        ax.legend()
        drawn.append(("The split over steps", "Per token, trainer minus sampler, raw.", plots.svg(figure)))
        figure, ax = _axes("step", "fraction of n")
        low, high = np.array([row["ess_sequence_interval"] for row in steps], float).T
        ax.fill_between(x, low, high, alpha=0.3)
        ax.plot(x, [row["ess_sequence"] for row in steps], label="sequence ESS, raw, π / q")
        ax.axhline(0.5, color="k", lw=0.8, ls="--", label="1/2")
        ax.set_ylim(0, 1.05)
        ax.legend()
        text = (
            f"With its 90 % interval; {steps[0]['n_responses']} responses in the first step. Small samples flatter it."
        )
        drawn.append(("ESS by step", text, plots.svg(figure)))
    prediction = outcome["collapse_prediction"]
    if prediction["curve"]:
        figure, ax = _axes("updates since the sync", "-ln ESS of the lag")
        k = np.array([row["k"] for row in prediction["curve"]], float)
        ax.plot(k, [row["var_log_ratio"] for row in prediction["curve"]], "o", label="measured")
        ax.plot(
            k, [row["fit"] for row in prediction["curve"]], label=f"fitted to the first {prediction['points_used']}"
        )
        ax.axhline(math.log(2), color="k", lw=0.8, ls="--", label="ln 2: ESS 1/2")
        if math.isfinite(prediction["ess_step"]):
            ax.axvline(prediction["ess_step"], ls=":", label=f"predicted ess_step {prediction['ess_step']:.0f}")
        ax.legend()
        drawn.append(("The lag's own curve", f"Sequence weights {prediction['of']}, raw.", plots.svg(figure)))
    sample = collected.sample
    t = sample.train - sample.rollout
    some = np.isfinite(t)
    t, position = t[some], sample.position[some]
    if len(t):
        figure, ax = _axes("log π - log q, nats", "tokens")
        ax.hist(t, bins=100, log=True)
        text = f"Raw, n = {len(t)} of {outcome['n_tokens']} tokens, whole responses."
        drawn.append(("Log ratios with their tails", text, plots.svg(figure)))
        width = (int(position.max()) + 1) / min(50, int(position.max()) + 1)
        bins = (position / width).astype(int)
        n = np.bincount(bins)
        figure, ax = _axes("position in the response, tokens", "mean t², nats²")
        ax.plot(np.flatnonzero(n) * width, (np.bincount(bins, t * t) / np.maximum(n, 1))[n > 0], marker=".")
        drawn.append(("Profile by position", text, plots.svg(figure)))
    return drawn


def _axes(x: str, y: str) -> tuple[Figure, Any]:
    figure = Figure(figsize=(7, 3), layout="constrained")
    ax = figure.subplots()
    ax.set(xlabel=x, ylabel=y)
    return figure, ax
