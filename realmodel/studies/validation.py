"""The runs behind `mismatch claims --real`: several kinds from one start, a few seeds each, and what they left."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import combinations
from pathlib import Path

import numpy as np
import polars as pl

from realmodel.engine.sampler import EngineConfig
from realmodel.policy import small
from realmodel.studies import compare, study
from realmodel.training.settings import RunConfig, learner
from sandbox.corrections import CIS, CORRECTIONS, Correction, EssBelow, EveryK, KlAbove, Never, Resync
from sandbox.errors import BadInput
from sandbox.theory.collapse import failure_step

KL_ALARM = 0.05  # nats a token, of the KL-triggered rule
RAISED = CIS(floor=-math.log(2))  # CIS with small weights raised: the ablation


@dataclass(frozen=True)
class Study:
    """What is run.

    Args:
        seeds: of each kind of run, >= 2.
        start: on-policy updates before every run. steps: updates of each run.
        offset_sd: nats; of the constant discrepancy injected into the engine, for claims C9 and C11.
        fast_rate: learning rate at which the ESS of token TIS falls below 1/2 within the updates, for C5 and C7.
        mixture: model of a mixture of experts, for C8, all evidence for which is on those; "" for none.
        base: all other settings.
    """

    seeds: int = 3
    start: int = 20
    steps: int = 40
    offset_sd: float = 0.3
    fast_rate: float = 4e-4
    mixture: str = "small-moe"
    base: RunConfig = field(
        default_factory=lambda: RunConfig(held_out=256, checkpoint_every=10, engine=EngineConfig(dtype="bfloat16"))
    )

    def __post_init__(self) -> None:
        for name, least in (("seeds", 2), ("start", 1), ("steps", 10)):
            if getattr(self, name) < least:
                raise BadInput(f"{name} is {getattr(self, name)}, expected at least {least}")
        planned(self)


def planned(asked: Study) -> dict[str, RunConfig]:
    """Every run by its name, kind-seed; those of one seed together."""
    fresh, never, rule = EveryK(1), Never(), EssBelow(0.5, z=1.645)
    engine = asked.base.engine
    exact = replace(engine, kind="exact", dtype="float32")
    off = replace(engine, offset_sd=asked.offset_sd)
    none, tis, dlc = (CORRECTIONS[name] for name in ("none", "tis", "dlc"))
    kinds: dict[str, tuple[Correction, Resync, EngineConfig]] = {
        "on-policy": (none, fresh, engine),
        "exact": (none, fresh, exact),
        "stale-none": (none, never, engine),
        "stale-tis": (tis, never, engine),
        "dlc": (dlc, rule, engine),
        "stale-cis": (CORRECTIONS["cis"], never, engine),
        "stale-raised": (RAISED, never, engine),
        "off-none": (none, fresh, off),
        "off-tis": (tis, fresh, off),
        "off-dlc": (dlc, fresh, off),
        "fast-on-policy": (none, fresh, engine),
        "fast-tis": (tis, never, engine),
        "fast-tis-ess": (tis, rule, engine),
        "fast-tis-kl": (tis, KlAbove(KL_ALARM), engine),
    }
    if asked.mixture:
        rules = {"none": none, "cis": CORRECTIONS["cis"], "raised": RAISED}
        for name, rule in rules.items():
            kinds[f"mixture-{name}"] = (rule, never, engine)
    runs = {}
    for seed in range(1, asked.seeds + 1):
        for kind, (correction, resync, engine) in kinds.items():
            probe = 0 if resync == fresh else asked.base.probe
            rate = asked.fast_rate if kind.startswith("fast") else asked.base.learning_rate
            config = replace(asked.base, seed=seed, steps=asked.steps, probe=probe, learning_rate=rate)
            model = asked.mixture if kind.startswith("mixture") else asked.base.model
            changed = {"correction": correction, "resync": resync, "engine": engine, "model": model}
            runs[f"{kind}-{seed}"] = replace(config, **changed)
    return runs


def carry_out(asked: Study, folder: Path, progress: study.Progress) -> None:
    """The runs that `folder` lacks."""
    start = study.on_policy_start(asked.base, asked.start, asked.base.engine)
    study.carry_out(start, planned(asked), folder, progress)


@dataclass(frozen=True)
class Evidence:
    """What the runs left: steps tables by kind, one a seed; and KL from the first on-policy run, nats a response."""

    steps: Mapping[str, list[pl.DataFrame]]
    kl: Mapping[str, list[float]]
    unit: list[float]  # KL between every two on-policy runs
    rollouts: Mapping[str, list[Path]]  # folders of the runs
    offset_sd: float  # nats; `Study.offset_sd`

    def rates(self, kind: str) -> list[np.ndarray]:
        return [compare.pass_rates(steps) for steps in self.steps[kind]]

    def lost(self, kind: str, against: str = "on-policy") -> np.ndarray:
        """Pass rate below the mean of the on-policy runs at the end, by seed."""
        mean = np.mean([rates[-1].mean() for rates in self.rates(against)])
        return np.array([mean - rates[-1].mean() for rates in self.rates(kind)])

    def failures(self, kind: str, against: str = "on-policy") -> np.ndarray:
        return np.array([failure_step(rates, self.rates(against)) for rates in self.rates(kind)])

    def ess_steps(self, kind: str) -> np.ndarray:
        return np.array([compare.observed_ess_step(compare.first_probe(steps)).step for steps in self.steps[kind]])


def evidence(asked: Study, folder: Path) -> Evidence:
    """Read a finished study; the KLs are computed on 1,024 responses to held-out problems. Raises BadInput for an
    unfinished one.
    """
    names = list(planned(asked))
    steps = study.steps_of(folder, names)
    if missing := [name for name in names if name not in steps]:
        raise BadInput(f"{folder} has unfinished runs: {', '.join(missing[:3])}; go on with --resume")
    by_kind: dict[str, list[pl.DataFrame]] = {}
    folders: dict[str, list[Path]] = {}
    for name in names:
        by_kind.setdefault(name.rsplit("-", 1)[0], []).append(steps[name])
        folders.setdefault(name.rsplit("-", 1)[0], []).append(folder / name)
    pupil = learner(small.resolve(asked.base.model, asked.base.task), asked.base)
    kinds = ("on-policy", "dlc", "stale-none", "stale-tis")
    weights = {kind: [study.final(run)["model"] for run in folders[kind]] for kind in kinds}
    responses = compare.held_out_responses(pupil, asked.base.task, weights["on-policy"][0])
    first = weights["on-policy"][0]
    kl = {kind: [compare.sequence_kl(pupil, responses, first, w) for w in weights[kind]] for kind in kinds[1:]}
    unit = []
    for a, b in combinations(weights["on-policy"], 2):
        drawn = responses if a is first else compare.held_out_responses(pupil, asked.base.task, a)
        unit.append(compare.sequence_kl(pupil, drawn, a, b))
    return Evidence(by_kind, kl, unit, folders, asked.offset_sd)
