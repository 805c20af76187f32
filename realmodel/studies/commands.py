"""What commands do that would not fit beside their arguments in cli.py; torch is imported with this file."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.progress import Progress

from realmodel.studies import claims, compare, grid, validation
from sandbox.errors import BadInput
from sandbox.experiments import claims as tabular
from sandbox.output import config as configs
from sandbox.output import report, run_folder

Told = tuple[dict[str, Any], dict[str, Sequence[dict[str, Any]]]]  # of --json, and tables for people


def compare_grid(source: Path, folder: Path, resume: bool, bar: Progress) -> Told:
    """Make the runs of a grid that its folder lacks, and compare."""
    asked = configs.load(source, grid.Grid)
    run_folder.begin_run(folder, configs.resolved(asked), resume)
    total = asked.start + sum(run.config.steps for run in grid.planned(asked))
    task = bar.add_task("starting", total=total)
    grid.carry_out(asked, folder, lambda what, done: bar.update(task, description=what, advance=done))
    table = grid.rows(asked, folder)
    grid.save(table, grid.curves(asked, folder), folder)
    run_folder.finish_run(folder)
    outcome = grid.outcome(table) | {"folder": str(folder)}
    steps = (*grid.WAYS, "observed", "failure_step")
    runs = [
        {"run": row["run"]}
        | {name: report.update_or_none(row[name], row["updates"]) for name in steps}
        | {"final_pass_rate": row["final_pass_rate"]}
        for row in table.to_dicts()
    ]
    return outcome, {"ess_step, updates since the sync": runs, "how well each way predicts": grid.scores(table)}


def real_claims(source: Path | None, folder: Path, resume: bool, bar: Progress) -> list[tabular.Row]:
    """The claims on the real model: the runs that the folder lacks, then the rows, saved as `tabular.save` does."""
    asked = validation.Study() if source is None else configs.load(source, validation.Study)
    run_folder.begin_run(folder, configs.resolved(asked), resume)
    task = bar.add_task(
        "starting", total=asked.start * (1 + bool(asked.mixture)) + asked.steps * len(validation.planned(asked))
    )
    validation.carry_out(asked, folder, lambda what, done: bar.update(task, description=what, advance=done))
    rows = claims.answer(validation.evidence(asked, folder))
    tabular.save(folder, rows)
    run_folder.finish_run(folder)
    return rows


def compare_runs(runs: Sequence[Path], on_policy: Sequence[Path], threshold: float) -> Told:
    """A row a run folder, of `compare.summary`."""
    if len(on_policy) < 2:
        raise BadInput(
            f"on_policy has {len(on_policy)} run folders, expected two or more: the noise of seeds needs two"
        )
    against = [compare.pass_rates(compare.read_steps(run)) for run in on_policy]
    rows = [{"run": run.name} | compare.summary(compare.read_steps(run), against, threshold) for run in runs]
    return {"runs": rows}, {
        "ess_step, updates since the sync": [
            {"run": row["run"]}
            | compare.shown(row)
            | {"final_pass_rate": row["final_pass_rate"], "syncs": row["syncs"]}
            for row in rows
        ]
    }
