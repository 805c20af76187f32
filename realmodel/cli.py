"""The command `mismatch`. Bad input and interruptions are one clear line on standard error and exit status 2.

With --json a command prints one JSON object on standard output and nothing else: everything that the engine and
its libraries print goes to standard error.
"""

import signal
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal

import tyro

from realmodel.terminal import beside_engine, new_folder, progress_bar, resumed, show
from sandbox.errors import BadInput
from sandbox.output import run_folder

Out = Annotated[Path | None, tyro.conf.arg(help="run folder to make; a new one under runs/ by default", metavar="DIR")]
Kept = Annotated[
    Path | None,
    tyro.conf.arg(help="folder to keep the outcome in (with report.html or figures); none by default", metavar="DIR"),
]
File = tyro.conf.Positional[Path]
Json = Annotated[bool, tyro.conf.arg(help="print one JSON object instead of a table")]


def demo(fast: bool = False, seeds: int = 1, out: Out = None, json: Json = False) -> None:
    """Predict, simulate and observe an ESS collapse, on a tabular policy and on a small Qwen3 sampled by vLLM.

    Args:
        fast: a smaller demo; takes less than two minutes once the small model is cached.
        seeds: stale runs of each kind (and one on-policy run more).
    """
    if seeds < 1:
        raise BadInput(f"seeds is {seeds}, expected 1 or more")
    folder = new_folder(out, "demo")
    with beside_engine() as (stdout, bar):
        from realmodel.studies import demo as demos  # torch and transformers take seconds to import

        size = replace(demos.FAST if fast else demos.FULL, seeds=seeds)
        task = bar.add_task("starting", total=demos.work(size))
        outcome = demos.run(size, folder, lambda what, done: bar.update(task, description=what, advance=done))
        bar.update(task, description="done", completed=demos.work(size))
        show(stdout, outcome, json, demos.tables(size, outcome))
        if not json:
            stdout.write(f"figures and explanation: {folder / 'report.html'}\n")


def predict(
    source: File, threshold: float = 0.5, on_policy: tuple[Path, ...] = (), out: Kept = None, json: Json = False
) -> None:
    """Predict the ess_step of a tabular config, or of a run folder from its own first updates.

    Args:
        source: TOML file of a tabular problem, see realmodel/configs/predict.toml, or the folder of a real-model run.
        threshold: sequence ESS of a collapse in a run folder; a TOML file states its own.
        on_policy: folders of two on-policy runs or more, to date the failure_step of a run folder.
    """
    from sandbox.experiments import predict as predictions
    from sandbox.output import config as configs

    if source.is_dir():
        from realmodel.studies import compare  # torch takes seconds to import

        asked = {"run": str(source), "threshold": threshold, "on_policy": [str(run) for run in on_policy]}
        outcome = compare.predict(source, on_policy, threshold)
    else:
        config = configs.load(source, predictions.PredictConfig)
        asked, outcome = configs.resolved(config), predictions.tabular(config)
    if out is not None:
        import polars as pl

        from sandbox.output import plots

        with run_folder.recorded(folder := new_folder(out, "predict"), asked):
            run_folder.write_json(folder / "predict.json", outcome)
            run_folder.write_table(folder / "curve.parquet", pl.DataFrame(outcome["curve"]))
            run_folder.write_text(folder / "predict.svg", plots.prediction(outcome["curve"], outcome["threshold"]))
    show(sys.stdout, outcome, json, predictions.tables(outcome))


def sweep(
    config: File,
    resume: bool = False,
    workers: int = -1,
    backend: Literal["loky", "dask", "ray"] = "loky",
    address: str | None = None,
    out: Out = None,
    json: Json = False,
) -> None:
    """Train a grid of cells on tabular problems, over discrepancy, lag, correction, step size and seeds.

    Args:
        config: TOML file, see realmodel/configs/sweep.toml.
        resume: go on with the folder --out, which an earlier call with this config has left.
        workers: processes; all cores by default.
        backend: local processes (loky), or a dask or ray cluster.
        address: of the cluster's scheduler; a local cluster by default.
    """
    from sandbox.experiments import sweep as grids
    from sandbox.output import config as configs
    from sandbox.output import plots

    settings = configs.load(config, grids.SweepConfig)
    if workers == 0 or workers < -1:
        raise BadInput(f"workers is {workers}, expected a number of processes, or -1 for all cores")
    folder = resumed(resume, out, config.stem)
    before = run_folder.read_run(folder).get("status") if resume else None
    with progress_bar() as bar:
        task = bar.add_task("tasks", total=None)

        def progress(done: int, total: int) -> None:
            if before and bar.tasks[task].total is None:  # the first call: no other process is at it
                how = {"running": "was killed", "interrupted": "was interrupted"}.get(before, before)
                print(f"mismatch: the run in {folder} {how}; {done} of {total} tasks are done", file=sys.stderr)
            bar.update(task, completed=done, total=total)

        table = grids.run(settings, folder, resume, workers, backend, address, progress)
    cells = grids.summary(table)
    rows, figure = cells.to_dicts(), plots.phase_maps(cells)
    if figure is not None:
        run_folder.write_text(folder / "phase_map.svg", plots.svg(figure))
    shown = {f"{len(table)} runs, a row a cell": grids.shown(settings, rows)}
    show(sys.stdout, {"cells": rows, "folder": str(folder)}, json, shown)
    if not json:
        sys.stdout.write(f"a row a run: {folder / 'runs.parquet'}\n")


def simulate(config: File, out: Kept = None, json: Json = False) -> None:
    """Train one cell of a sweep many times, in this process. --out keeps every step of every run.

    Args:
        config: TOML file of a sweep whose axes have one value each, see realmodel/configs/sweep.toml.
    """
    from sandbox.experiments import sweep as grids
    from sandbox.output import config as configs

    settings = configs.load(config, grids.SweepConfig)
    folder = None if out is None else new_folder(out, config.stem)
    steps, row = grids.one(settings)
    if folder is not None:
        with run_folder.recorded(folder, configs.resolved(settings)):
            run_folder.write_table(folder / "steps.parquet", steps)
    show(sys.stdout, row, json, {f"{settings.runs} runs": grids.shown(settings, [row])})


def train(config: File, resume: bool = False, dry_run: bool = False, out: Out = None, json: Json = False) -> None:
    """Train the real model once, from a TOML config. Prints the last measurements.

    Args:
        config: TOML file, see realmodel/configs; or, with --resume, the folder of a run.
        resume: go on from the last whole step of a run that was killed: in this folder, in --out, or in the newest
            folder of this config under runs/. Where there is none, a new run starts.
        dry_run: check the config, and say what memory it needs and what the engine would be started with.
    """
    from sandbox.output import config as configs

    with beside_engine() as (stdout, bar):
        from realmodel.engine import sampler
        from realmodel.policy import small, tasks
        from realmodel.studies import dryrun
        from realmodel.training import train as loop

        if config.is_dir():
            if not resume:
                raise BadInput(f"{config} is a folder: a TOML file is expected, or --resume to go on with a run")
            folder, settings = config, configs.structure(run_folder.read_run(config)["config"], loop.RunConfig)
        else:
            settings = configs.load(config, loop.RunConfig)
            if dry_run:
                outcome = dryrun.plan(settings)
                return show(stdout, outcome, json, dryrun.tables(outcome))
            older = sorted(Path("runs").glob(f"{config.stem}-*-*")) if resume and out is None else []
            folder = older[-1] if older else out if resume and out and out.is_dir() else new_folder(out, config.stem)
        tasks.get(settings.task)
        task = bar.add_task("starting", total=settings.steps)
        path = small.resolve(settings.model, settings.task)
        llm = sampler.start(path, settings.engine)
        learner = loop.learner(path, settings)

        def progress(row: dict) -> None:
            bar.update(task, description=f"update {row['step'] + 1}, reward {row['reward']:.2f}", advance=1)

        steps = loop.train(settings, llm, learner, folder, progress, resume)
        last = steps.tail(1).with_columns(pass_rate=steps.tail(1)["pass_probability"].list.mean())
        kept = {k: v for k, v in last.drop("pass_probability").to_dicts()[0].items() if v is not None}
        show(stdout, kept | {"folder": str(folder)}, json, {f"{config.stem}, after the last update": [kept]})
        if not json:
            stdout.write(f"steps.parquet and rollouts: {folder}\n")


def exact(problem: tyro.conf.Positional[str], matrices: bool = False, out: Kept = None, json: Json = False) -> None:
    """Print every exact quantity of a tabular problem: returns, ESS, KL, gradient, expected updates, their biases.

    Args:
        problem: PROBLEM.json, or a preset: bandit, sparse_tree, machine, long, hidden_collapse, negative_prefixes.
        matrices: also the eigenvalues of the lag's feedback, H, M and F; for small problems.
    """
    from sandbox.experiments import exact_report
    from sandbox.output import problem_json

    case = problem_json.named(problem)
    folder = None if out is None else new_folder(out, "exact")
    outcome = exact_report.summary(case, matrices)
    if folder is not None:
        with run_folder.recorded(folder, {"problem": problem, "matrices": matrices}):
            problem_json.save(folder / "problem.json", case)
            run_folder.write_json(folder / "exact.json", outcome)
    show(sys.stdout, outcome, json, exact_report.tables(outcome))


def claims(
    names: tyro.conf.Positional[tuple[str, ...]] = (),
    fast: bool = False,
    seed: int = 0,
    real: bool = False,
    config: Path | None = None,
    resume: bool = False,
    out: Kept = None,
    json: Json = False,
) -> None:
    """Test the claims of the field, by criteria fixed in advance, on tabular policies or on the real model.

    Args:
        names: tabular claims to test, such as C5 or N3; all by default.
        fast: fewer runs and updates, under half a minute.
        seed: of the drawn problems and of their runs; criteria and settings are those chosen at 0.
        real: on the real model, in a run folder; a quarter of an hour on two cores.
        config: of the real runs, see realmodel/configs/validate.toml; its settings are the default.
        resume: go on with the real runs in --out.
    """
    from sandbox.experiments import claims as tested

    if seed < 0:
        raise BadInput(f"seed is {seed}, expected 0 or more")
    if real:
        folder = resumed(resume, out, "claims-real")
        with beside_engine() as (stdout, bar):
            from realmodel.studies import claims as observed

            rows = observed.run(config, folder, resume, bar)
            show(stdout, tested.outcome(rows), json, {f"claims on the real model: {folder}": tested.shown(rows)})
        return
    wanted = tested.chosen(names)
    folder = None if out is None else new_folder(out, "claims")
    rows = []
    with progress_bar() as bar:
        task = bar.add_task("starting", total=len(wanted))
        for claim in wanted:
            bar.update(task, description=f"{claim.id}: {claim.statement[:36]}")
            rows += tested.run([claim], fast, seed)
            bar.advance(task)
    if folder is not None:
        with run_folder.recorded(folder, {"claims": [claim.id for claim in wanted], "fast": fast, "seed": seed}):
            tested.save(folder, rows)
    show(sys.stdout, tested.outcome(rows), json, {"claims": tested.shown(rows)})


def compare(
    source: tyro.conf.Positional[tuple[Path, ...]],
    on_policy: tuple[Path, ...] = (),
    threshold: float = 0.5,
    resume: bool = False,
    out: Out = None,
    json: Json = False,
) -> None:
    """Compare predicted and observed ess_step, of run folders or of a grid of runs. The grid is made first.

    Args:
        source: a grid's TOML file, see realmodel/configs/grid.toml, or folders of real-model runs.
        on_policy: folders of two on-policy runs or more, that run folders are held against.
        threshold: sequence ESS of a collapse in run folders; a TOML file states its own.
        resume: go on with the grid in --out.
    """
    with beside_engine() as (stdout, bar):
        from realmodel.studies import compare as comparisons
        from realmodel.studies import grid

        if not source:
            raise BadInput("source is missing: a grid's TOML file, or run folders")
        if source[0].is_dir():
            outcome, tables = comparisons.runs(source, on_policy, threshold)
        else:
            outcome, tables = grid.run(source[0], resumed(resume, out, source[0].stem), resume, bar)
        show(stdout, outcome, json, tables)


def diagnose(
    dumps: tyro.conf.Positional[tuple[Path, ...]],
    format: str | None = None,
    map: tuple[str, ...] = (),
    lag: int | None = None,
    trust_pickle: bool = False,
    out: Kept = None,
    json: Json = False,
) -> None:
    """Say what is wrong with a run, from its dumps: numerics, lag or a bug; and what to change.

    Args:
        dumps: files or folders: a run of ours, NeMo-RL, prime-rl, slime, miles, or any Parquet or JSON lines.
        format: canonical, nemo-rl, prime-rl, slime or miles; by default told from the content.
        map: canonical=theirs, for columns that have another name in Parquet or JSON lines.
        lag: how many versions every token is behind; replaces what the dump says.
        trust_pickle: also open torch files that could run code.
    """
    from realmodel.dumps import diagnosis

    folder = None if out is None else new_folder(out, "diagnose")
    outcome, evidence = diagnosis.run(dumps, format, map, lag, trust_pickle)
    if folder is not None:
        diagnosis.save(folder, {"dumps": [str(d) for d in dumps], "map": list(map), "lag": lag}, outcome, evidence)
    show(sys.stdout, outcome, json, diagnosis.tables(outcome))


COMMANDS = (claims, compare, demo, diagnose, exact, predict, simulate, sweep, train)


def main() -> int:
    """Entry point; returns the exit status."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _interrupt)
    try:
        tyro.extras.subcommand_cli_from_dict({command.__name__: command for command in COMMANDS}, prog="mismatch")
    except BadInput as error:
        print(f"mismatch: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("mismatch: interrupted; whatever is in a run folder is whole", file=sys.stderr)
        return 2
    except OSError as error:
        with suppress(OSError):  # standard error may be what is full
            print(f"mismatch: {error.filename or 'output'}: {error.strerror or error}", file=sys.stderr)
        return 2
    return 0


def _interrupt(*_: object) -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)  # a second one would cut the first one's tidying short
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
