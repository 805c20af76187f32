"""Claims C1 to C11 and neighbouring results N1 to N7 (THEORY sections 8 and 9): what is claimed, by what criterion.

Criteria and thresholds are constants here, written before the runs. A claim that fails is a result.
"""

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import polars as pl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from sandbox.errors import BadInput
from sandbox.experiments import neighbours, remedies, sources
from sandbox.experiments.verdicts import Claim, Outcome, Verdict
from sandbox.output import report, run_folder, theory_plots
from sandbox.output.plots import STYLES, label, svg


def sources_figure(ax: Axes, table: pl.DataFrame) -> Axes:
    """RMS over the table of discrepancy and lag against updates."""
    ax.plot(table["step"], table["d"], ":", color="0.3", label="discrepancy d")
    ax.plot(table["step"], table["g"], color="#0072B2", label="lag g")
    ax.set(xlabel="optimiser updates", ylabel="RMS over states and tokens (nats)")
    return ax


def loop_figure(ax: Axes, table: pl.DataFrame) -> Axes:
    """Excess lag over the exactly corrected run, measured and predicted."""
    for (name,), rows in table.group_by("preset", maintain_order=True):
        (line,) = ax.plot(rows["k"], rows["lag_none"] / rows["lag_exact"] - 1, label=name)
        ax.plot(rows["k"], rows["predicted"] / rows["lag_exact"] - 1, ":", color=line.get_color())
    ax.plot([], [], ":", color="0.3", label="predicted")
    ax.set(xlabel="updates since the sync, k", ylabel="excess lag over the exactly corrected")
    return ax


def source_figure(ax: Axes, table: pl.DataFrame) -> Axes:
    """Share of the on-policy gain lost under each source alone, one point a problem and correction."""
    for (name,), rows in table.group_by("problem", maintain_order=True):
        ax.plot(rows["discrepancy"], rows["lag"], "o", label=name)
        for row in rows.to_dicts():
            ax.annotate(row["correction"], (row["discrepancy"], row["lag"]), fontsize=7)
    ax.set(xlabel="gain lost under discrepancy alone", ylabel="gain lost under lag alone")
    return ax


def phase_figure(ax: Axes, table: pl.DataFrame) -> Axes:
    """Share of the gain lost against T x KL, token and sequence TIS."""
    fresh = table.filter(pl.col("period") == 1)
    for (name, horizon), rows in fresh.group_by("correction", "horizon", maintain_order=True):
        named, color = f"{label(str(name))}, T = {horizon}", STYLES[str(name)]["color"]
        ax.plot(rows["t_kl"], rows["lost"], "o-", label=named, color=color)
    ax.axvline(20, color="0.4", linewidth=0.8)
    ax.set(xlabel="T x KL at the start (nats)", ylabel="share of the on-policy gain lost", xscale="log")
    return ax


CLAIMS: tuple[Claim, ...] = (
    Claim("C1", "The token error splits exactly into discrepancy and lag, t = d + g.",
          "largest |d + g - t| is 0, in rational arithmetic",
          0.0, sources.token_error_splits),
    Claim("C2", "d stays about constant through training while g grows between syncs.",
          "largest change of any d between syncs is 0, and g grows from 0",
          0.0, sources.discrepancy_is_constant, sources_figure),
    Claim("C3", "d biases updates by a nearly fixed amount; centring removes its leading part. The verdict here"
          " depends on the drawn problem: LOG.md.",
          "over 20 on-policy updates the cosine of the bias with the first is >= .9 and its size within [1/2, 2] of"
          " it; what centring leaves of a small d is the other three parts to 1e-3",
          0.9, sources.discrepancy_bias, theory_plots.bias_by_horizon),
    Claim("C4", "Lag alone closes a feedback loop; discrepancy alone adds a constant to every update. The verdict"
          " here depends on the drawn problem: LOG.md.",
          "excess lag over the exactly corrected run has the sign of the linear loop on every preset, both signs"
          " occur, and it is within 25 % of it while ESS >= 1/2; the excess of discrepancy grows as k^(1 +- .2), that"
          " of lag at least as k^1.8",
          0.25, sources.lag_closes_a_loop, loop_figure),
    Claim("C5", "Importance weighting cuts the loop while the lag ratio is concentrated and fails at the step where"
          " its ESS falls below one half.",
          "median failure_step / ess_step of sequence weights: 95 % interval within [1/2, 2]",
          2.0, remedies.weighting_fails_at_half),
    Claim("C6", "Under a stale sampler DLC keeps KL from on-policy training within twice that between two on-policy"
          " trainings.",
          "upper 95 % limit of the ratio <= 2, for pi and for q, with one optimum and with sparse rewards",
          2.0, remedies.dlc_stays_near_on_policy),
    Claim("C7", "Resync prevents collapses that per-token corrections and the KL on the sampler's prefixes miss. The"
          " verdict here depends on the drawn problem: LOG.md.",
          "token TIS and DLC lose more than a tenth of the on-policy gain when never synced (lower 95 % limit) and"
          " less when synced at ESS < 1/2 (upper limit), and the per-token KL is below .01 at ess_step, on both"
          " problems",
          0.1, remedies.resync_prevents),
    Claim("C8", "CIS bounds the second moment by a constant, its bias comes only from the excess, and raising small"
          " weights hurts.",
          "E_q[w^2] <= e^cap and w = pi/q below the cap, for random policies; raising small weights lowers the final"
          " return or objective (upper 95 % limit of the difference < 0) in every case",
          0.0, remedies.calibrated_weights),
    Claim("C9", "Small token-level numerics alone, with zero lag, can collapse training, and an exact sampler does"
          " not.",
          "some problem, one designed for it included, loses more than half of the on-policy gain (lower 95 % limit)"
          " under an offset of sd <= .05 nats",
          0.5, remedies.small_numerics_alone),
    Claim("C10", "An exact sampler has train-sampler KL exactly 0 at every step.",
          "largest |log pi - log q| before any update is 0",
          0.0, sources.exact_sampler_has_no_kl),
    Claim("C11", "A correction that is stable under one source can fail under the other.",
          "some correction loses less than a tenth of the on-policy gain under one source (upper 95 % limit) and more"
          " under the other (lower limit)",
          0.1, remedies.source_by_correction, source_figure),
    Claim("N1", "Scaling the learning rate by ESS stabilises stale sequence weights (VCPO, arXiv 2602.17616).",
          "with sequence TIS, lr x ESS ends above lr (lower 95 % limit > 0), synced as often as DLC does and a fourth"
          " as often",
          0.0, neighbours.rate_times_ess),
    Claim("N2", "Successive stale updates align, synchronous ones do not (GAC, arXiv 2603.01501).",
          "mean cosine in the later half of training >= .5 when synced every 16 updates (lower 95 % limit) and <= .2"
          " when synced after every one (upper limit)",
          0.5, neighbours.stale_updates_align),
    Claim("N3", "Staleness times learning rate decides (arXiv 2607.01083).",
          "ess_step x eta varies by a factor of at most 1.25 over a sixteen-fold range of eta, mean field",
          1.25, neighbours.staleness_times_rate),
    Claim("N4", "Without the trainer's log-probs at the sampler's weights the two factors entangle (arXiv"
          " 2605.12070).",
          "two worlds that differ in what is lag show exactly the same pi and q",
          0.0, neighbours.not_identifiable),
    Claim("N5", "Small numerics alone collapse training, a zero-mismatch engine does not (VeXact, arXiv 2605.14220).",
          "those of C9 and C10",
          math.nan, neighbours.elsewhere),
    Claim("N6", "Learning-rate decay suppresses mismatch (arXiv 2602.01826): the lag, not the discrepancy.",
          "ten updates after a sync the rms of g grows as eta^(1 +- .1) and that of d not at all",
          0.1, neighbours.rate_and_sources),
    Claim("N7", "T x KL near 20 kills sequence weights, token TIS survives it (mismatch-praxis).",
          "sequence TIS first loses half of the on-policy gain at a T x KL within a factor 2 of 20",
          2.0, neighbours.sequence_weights_die, phase_figure),
)  # fmt: skip


@dataclass(frozen=True, eq=False)
class Row:
    """A claim and what a run of it found; `Claim` and `Outcome` say what the fields are."""

    id: str
    statement: str
    criterion: str
    threshold: float
    value: float
    interval: tuple[float, float]
    n: int
    verdict: Verdict
    reason: str
    measured: dict[str, Any]
    table: pl.DataFrame
    seconds: float


def chosen(names: Sequence[str]) -> tuple[Claim, ...]:
    """The named claims in their own order, all where none is named; BadInput for an unknown one."""
    known = {claim.id: claim for claim in CLAIMS}
    for name in names:
        if name not in known:
            raise BadInput(f"unknown claim {name!r}, known: {', '.join(known)}")
    return tuple(claim for claim in CLAIMS if not names or claim.id in names)


def run(claims: Sequence[Claim], fast: bool = False, seed: int = 0) -> Iterator[Row]:
    """One row a claim, each as soon as it is there, on the problems and runs of `seed`; criteria and settings stay."""
    for claim in claims:
        start = time.perf_counter()
        found = claim.experiment(claim.threshold, fast, seed)
        yield row_of(claim, found, time.perf_counter() - start)


def row_of(claim: Claim, found: Outcome, seconds: float) -> Row:
    """A claim beside what an experiment of `seconds` found."""
    return Row(
        claim.id, claim.statement, claim.criterion, claim.threshold, found.value, found.interval, found.n,
        found.verdict, found.reason, found.measured, found.table, seconds,
    )  # fmt: skip


def outcome(rows: Sequence[Row]) -> dict[str, Any]:
    """What `mismatch claims --json` prints: `claims`, one object each, and `seconds`."""
    named = [{name: value for name, value in vars(row).items() if name != "table"} for row in rows]
    return {"claims": named, "seconds": sum(row.seconds for row in rows)}


def shown(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """The claims table for people."""
    return [
        {
            "claim": row.id,
            "verdict": row.verdict,
            "measured": row.value,
            "95 % interval": _interval(row),
            "threshold": row.threshold,
            "n": row.n,
            "seconds": round(row.seconds, 1),
            "reason": row.reason,
        }
        for row in rows
    ]


def _interval(row: Row) -> Any:
    if not math.isnan(row.interval[0]):
        return row.interval
    return None if row.id == "N7" or not row.n else "exact"


def save(folder: Path, rows: Sequence[Row]) -> None:
    """claims.json, a Parquet file for each figure's table and report.html, into a run folder."""
    run_folder.write_json(folder / "claims.json", outcome(rows))
    sections = [report.Section("The claims", rows=report.aligned(shown(rows)))]
    for row in rows:
        figure = ""
        if len(row.table):
            run_folder.write_table(folder / f"{row.id}.parquet", row.table)
        draw = next((claim.figure for claim in CLAIMS if claim.id == row.id), None)
        if draw is not None and len(row.table):
            canvas = Figure(figsize=(5, 3.4), layout="constrained")
            draw(canvas.subplots(), row.table).legend(fontsize=8)
            figure = svg(canvas)
        prose = (row.statement, f"Criterion, written before the run: {row.criterion}.", f"Found: {row.reason}.")
        numbers = tuple({"measured": name, "value": value} for name, value in row.measured.items())
        sections.append(report.Section(f"{row.id}: {row.verdict}", prose, numbers, figure))
    run_folder.write_text(folder / "report.html", report.render("Claims", sections, run_folder.foot()))
