"""A run between two steps: what its sampler holds, the batches under way, and how both come back from a checkpoint."""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
from torch import Tensor

from realmodel.engine import sampler, sync
from realmodel.policy import model as policy
from realmodel.policy import tasks
from realmodel.policy.align import WHOLE, Rollout, pad, wanted
from realmodel.policy.logprobs import log_probs_of_many
from realmodel.training import checkpoint
from realmodel.training.checkpoint import Checkpoint
from realmodel.training.settings import Learner, RunConfig
from sandbox.errors import BadInput

VERIFIED = 8  # responses compared after every sync


@dataclass(frozen=True)
class Synced:
    """The sampler since its last sync: the version it holds, and what its verification measured."""

    version: int
    max_difference: float


@dataclass(frozen=True)
class Probe:
    """Responses on which the lag is measured, the version that drew them, and log mu of their tokens. (N, 1)"""

    version: int
    rollout: Rollout
    mu: Tensor


@dataclass(frozen=True)
class Draft:
    """A batch under way: the number of its prompts in the run, they, their stream before, and what was drawn so far."""

    number: int
    problems: list[tasks.Problem]
    prompts: str
    rollout: Rollout | None = None


@dataclass
class Run:
    """A run between two steps: what it was asked, its engine and learner, and what the next step needs."""

    config: RunConfig
    llm: Any
    learner: Learner
    step: int
    prompts: np.random.Generator
    drawn: int
    queue: list[Draft]
    snapshots: dict[int, dict[str, Tensor]]
    at_sync: Synced
    rows: list[dict]
    probe: Probe | None = None


def begin(config: RunConfig, llm: Any, learner: Learner, folder: Path) -> Run:
    """A run at its start, or where its last checkpoint left it, with the engine and the learner at that point.

    Raises BadInput for a damaged checkpoint or steps table.
    """
    saved = checkpoint.load(folder)
    prompts = np.random.default_rng([config.seed, 0])
    run = Run(config, llm, learner, 0, prompts, 0, [], {}, Synced(0, 0.0), [])
    if saved is None:
        sync_now(run, version=0)
        return run
    prompts.bit_generator.state = json.loads(saved.prompts)
    try:
        run.rows = pl.read_parquet(folder / "steps.parquet").head(saved.step).to_dicts()
    except (OSError, pl.exceptions.PolarsError) as error:
        raise BadInput(f"run folder {folder} has no readable steps.parquet") from error
    run.step, run.drawn, run.snapshots = saved.step, saved.drawn, saved.snapshots
    run.queue = [replace(_draft(run), rollout=rollout) for rollout in saved.queue]
    # the probe is not kept: the same seed and weights draw the same one
    for version in sorted({0 if config.probe_kept else saved.version, saved.version}):
        learner.model.load_state_dict(saved.snapshots[version])
        sync_now(run, version)
    learner.restore(saved.learner)
    return run


def save(run: Run, folder: Path, step: int) -> None:
    """Write the checkpoint from which `begin` goes on with `step`."""
    oldest = run.queue[0] if run.queue else None
    prompts = oldest.prompts if oldest else json.dumps(run.prompts.bit_generator.state)
    queue = [draft.rollout for draft in run.queue if draft.rollout is not None]
    drawn = oldest.number if oldest else run.drawn
    state = Checkpoint(step, prompts, drawn, queue, run.snapshots, run.at_sync.version, run.learner.state())
    checkpoint.save(folder, state)


def sync_now(run: Run, version: int) -> None:
    """Push, verify, draw the probe, and forget the snapshots that no token under way was drawn from."""
    config, model, tokenizer = run.config, run.learner.model, run.learner.tokenizer
    problems = tasks.get(config.task).sample(np.random.default_rng([0, 2]), max(config.probe, VERIFIED), held_out=False)
    sync.push(run.llm, model)
    verification = sync.verify(run.llm, model, [tokenizer.encode(p.prompt) for p in problems[:VERIFIED]])
    used = {int(v) for draft in run.queue if draft.rollout for row in draft.rollout.versions() for v in np.unique(row)}
    if config.probe_kept and run.probe:
        used.add(run.probe.version)
    run.snapshots = {v: w for v, w in run.snapshots.items() if v in used}  # before the new one: memory
    run.snapshots[version] = policy.snapshot(model)
    run.at_sync = Synced(version, verification.max_difference)
    if config.probe and not (config.probe_kept and run.probe):
        probe = _draw(run, Draft(0, problems[: config.probe], ""), version, _seed(run, 2, version))
        ids, _ = pad(probe, tokenizer.pad_token_id)
        mu = log_probs_of_many(model, ids, *wanted(probe, ids.shape[1], 0, centre=False))
        run.probe = Probe(version, probe, mu)


def of_live(run: Run, problems: list[tasks.Problem], version: int) -> Rollout:
    """One response a problem from the live weights; where the engine holds older ones, it has them back afterwards."""
    held = run.at_sync.version
    if version != held:
        sync.push(run.llm, run.learner.model)
    rollout = _draw(run, Draft(0, problems, ""), version, _seed(run, 3, version))
    if version != held:
        sync.push(run.llm, run.learner.model, run.snapshots[held])
    return rollout


def top(config: RunConfig) -> int:
    """The log-probabilities that the correction needs of the sampler, besides the drawn token's."""
    return (config.centre_top or WHOLE) if config.correction.centres else 0


def next_batch(run: Run) -> tuple[list[tasks.Problem], Rollout]:
    """The batch of this update, first drawn `delay` updates ago; those behind it get their next tokens too."""
    delay, segment = run.config.delay, run.config.segment
    while len(run.queue) <= delay:
        run.queue.append(_draft(run))
    for i, draft in enumerate(run.queue):
        if draft.rollout is None or segment:
            seed = _seed(run, 1, draft.number, *(() if draft.rollout is None else (delay - i,)))
            some = segment if i and segment else None
            rollout = _draw(run, draft, run.at_sync.version, seed, run.config.group, some)
            if segment:  # a version a token in every table of the run, also of what was drawn at once
                rollout = replace(rollout, token_versions=rollout.versions())
            run.queue[i] = replace(draft, rollout=rollout)
    oldest = run.queue.pop(0)
    assert oldest.rollout is not None
    return oldest.problems, oldest.rollout


def _draft(run: Run) -> Draft:
    state, task = json.dumps(run.prompts.bit_generator.state), tasks.get(run.config.task)
    draft = Draft(run.drawn, task.sample(run.prompts, run.config.prompts, held_out=False), state)
    run.drawn += 1
    return draft


def _seed(run: Run, *what: int) -> int:
    return int(np.random.SeedSequence([run.config.seed, *what]).generate_state(1)[0])


def _draw(run: Run, draft: Draft, version: int, seed: int, n: int = 1, some: int | None = None) -> Rollout:
    """`some` more tokens of every unfinished response of a batch, n a prompt; None: all that it may have."""
    encode = run.learner.tokenizer.encode
    longest = tasks.get(run.config.task).max_new_tokens or 1 + max(len(encode(p.answer)) for p in draft.problems)
    begun = 0 if draft.rollout is None else max(map(len, draft.rollout.response_ids))
    new = longest - begun if some is None else min(some, longest - begun)
    if draft.rollout is not None:
        return sampler.extend(run.llm, draft.rollout, new, seed, version) if new else draft.rollout
    prompts, needed = [encode(p.prompt) for p in draft.problems], top(run.config) if n > 1 else 0
    return sampler.generate(
        run.llm, prompts, n, max_new_tokens=new, seed=seed, top=needed, version=version, room=longest - new
    )
