"""Dumps whose cause is known: rollouts of exact tabular policies, with one thing wrong (or none).

`rows(cause, seed)` gives canonical rows, one dict a response. The trainer climbs the exact gradient of a state machine
with a little noise; the sampler holds an older version, draws exactly from its own q, and reports what the cause says.
`CAUSES` names them, with the verdict and the finding that a diagnosis should give. Magnitudes vary with the seed.
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from sandbox.arrays import log_softmax
from sandbox.diagnosis import dumps, refusals
from sandbox.diagnosis.rollouts import Chunk
from sandbox.errors import BadInput
from sandbox.tabular import exact, problems
from sandbox.tabular.problems import Problem

STATES, VOCABULARY, LONGEST, SHORTEST = 96, 12, 48, 10


@dataclass(frozen=True)
class Cause:
    """What is wrong with a dump, and what a diagnosis should say.

    Args:
        verdict: the right one.
        code: a finding that must be among those of the diagnosis; "" for none.
        discrepancy: standard deviation of the engine's log-offset, nats.
        period: updates between syncs.
        sync: whether logp_sync was recorded.
    """

    verdict: str
    code: str = ""
    discrepancy: float = 0.004
    period: int = 1
    sync: bool = True


CAUSES: dict[str, Cause] = {
    "healthy": Cause("healthy"),
    "numerics": Cause("numerics", discrepancy=0.07),
    "lag": Cause("lag", period=5),
    "lag, no logp_sync": Cause("lag", period=5, sync=False),
    "partial rollouts": Cause("lag", "mixed_versions", period=4),
    "trainer's temperature": Cause("semantics", "temperature"),
    "raw log-probs": Cause("semantics", "raw_logprobs"),
    "top-p": Cause("semantics", "truncated_support"),
    "top-k": Cause("semantics", "truncated_support"),
    "shift": Cause("semantics", "shift"),
    "observation tokens": Cause("semantics", "observation_tokens"),
    "EOS of 0.0": Cause("semantics", "placeholder"),
    "retokenised": Cause("semantics", "ids_differ"),
    "bfloat16": Cause("numerics", "low_precision_grid", discrepancy=0.07),
    "mixture": Cause("numerics", "mixture_tail", discrepancy=0.002),
    "growing discrepancy": Cause("numerics", "discrepancy_not_constant"),
    "weights arrive late": Cause("hidden_staleness", "hidden_staleness", sync=False),
    "published before applied": Cause("hidden_staleness", "hidden_staleness", sync=False),
    "old at current weights": Cause("not_identifiable", "recomputed_old", sync=False),
    "reward collapses alone": Cause("prediction_failed", "prediction_failed"),
    "padding of -9999": Cause("semantics", "placeholder"),
    "negative lag": Cause("semantics", "negative_lag"),
    "text encoded again": Cause("semantics", "retokenised"),
    "weights as a mask": Cause("semantics", "not_a_mask"),
    "corrected twice": Cause("semantics", "double_correction", period=3),
    "bfloat16 logits, sure": Cause("healthy", discrepancy=0.0),
}


def chunk(rows: list[dict[str, Any]], lag: int | None = None, seen: set | None = None) -> Chunk:
    """Rows as the readers would hand them over, what cannot be used left out."""
    return refusals.check(
        dumps.table_of("synthetic", np.arange(len(rows)), rows, []), set() if seen is None else seen, lag
    )


def rows(cause: str, seed: int, steps: int = 12, responses: int = 32) -> list[dict[str, Any]]:
    """A dump of `steps` training steps with so many responses each, four to a prompt.

    Raises BadInput for a cause that is not in CAUSES.
    """
    if cause not in CAUSES:
        raise BadInput(f"cause is {cause!r}, expected one of {', '.join(CAUSES)}")
    asked, rng = CAUSES[cause], np.random.default_rng(np.random.SeedSequence([seed, list(CAUSES).index(cause)]))
    problem = problems.state_machine(rng, STATES, VOCABULARY, LONGEST)
    weights = _training(rng, problem, steps, cause)
    offset = asked.discrepancy * rng.uniform(0.7, 1.4) * rng.normal(size=problem.shape)
    size = rng.uniform(0.0, 1.0)  # of what is wrong, between mild and strong
    found, start = [], 0
    for step in range(steps):
        behind = step % asked.period
        if cause == "weights arrive late":
            behind = step % 4
        if cause == "old at current weights":
            behind = min(2, step)
        if cause == "growing discrepancy":
            offset = 0.02 * (1 + (4 + 4 * size) * step / steps) * rng.normal(size=problem.shape)
        group = _Group(problem, weights, step, behind, offset, cause, size)
        for i in range(responses):
            start = int(rng.integers(STATES)) if i % 4 == 0 else start
            row = group.response(rng, start)
            row |= {"step": step, "prompt_id": f"{step}-{i // 4}", "sample_id": f"{step}-{i}", "rank": i % 2}
            if not asked.sync:
                del row["logp_sync"]
            found.append(row)
    return found


def _training(rng: np.random.Generator, problem: Problem, updates: int, cause: str) -> list[np.ndarray]:
    """Logits of every version: noisy steps along the exact gradient, sure in some states and unsure in others."""
    logits = rng.uniform(0.5, 3.5, size=(STATES, 1)) * rng.normal(size=problem.shape)
    versions = [logits]
    for _ in range(updates):
        gradient = exact.gradient(problem, log_softmax(logits))
        scale = 0.045 / max(float(np.sqrt(np.mean(gradient**2))), 1e-12)
        logits = logits + scale * gradient + 0.05 * rng.normal(size=problem.shape)
        versions.append(logits)
    return versions if cause != "bfloat16 logits, sure" else [2.5 * logits for logits in versions]


class _Group:
    """The responses of one step: the tables they are drawn from and scored with."""

    def __init__(
        self,
        problem: Problem,
        weights: list[np.ndarray],
        step: int,
        behind: int,
        offset: np.ndarray,
        cause: str,
        size: float,
    ) -> None:
        self.problem, self.step, self.behind, self.cause, self.size = problem, step, behind, cause, size
        self.weights, self.offset = weights, offset
        self.temperature = {"raw log-probs": 0.5 + 0.35 * size}.get(cause, 1.0)
        self.top_p = 0.8 + 0.12 * size if cause == "top-p" else 1.0
        self.top_k = 3 + int(3 * size) if cause == "top-k" else 0
        self.trainer_temperature = self.temperature
        if cause == "trainer's temperature":
            self.trainer_temperature = (0.65 + 0.2 * size) if step >= 0 and size < 0.5 else 1.15 + 0.25 * size

    def _q(self, version: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """What the sampler draws from at a version, and what it says of it. (S, V) both"""
        offset = self.offset
        if self.cause == "mixture":  # routing flips in some (prefix, token) pairs, anew for every response
            flips = rng.random(offset.shape) < 0.01 + 0.015 * self.size
            offset = offset + flips * rng.normal(size=offset.shape)
        logits = self.weights[version]
        if self.cause.startswith("bfloat16 logits"):
            logits = bfloat16(logits)
        raw = log_softmax(log_softmax(logits) + offset)
        q = log_softmax(raw / self.temperature)
        if self.top_k or self.top_p < 1:
            q = _cut(q, self.top_p, self.top_k)
        said = raw if self.cause == "raw log-probs" else q
        return q, said

    def response(self, rng: np.random.Generator, start: int) -> dict[str, Any]:
        """One row: what was drawn from state `start` (the prompt) on, and what the dump says of it."""
        length = int(rng.integers(SHORTEST, LONGEST + 1))
        version = self.step - self.behind
        if self.cause == "published before applied" and rng.random() < 0.25 + 0.3 * self.size:
            version = max(self.step - 3, 0)
        drawn = np.full(length, version)
        if self.cause == "partial rollouts" and rng.random() < 0.5:
            drawn[: int(rng.integers(1, length))] = max(version - 2, 0)
        pairs, said = self._draw(rng, drawn, start)
        trainer = log_softmax(log_softmax(self.weights[self.step]) / self.trainer_temperature).ravel()[pairs]
        sync = np.empty(length)
        for one in np.unique(drawn):
            at = log_softmax(log_softmax(self.weights[one]) / self.trainer_temperature).ravel()
            sync[drawn == one] = at[pairs[drawn == one]]
        earned = float(self.problem.reward.ravel()[pairs].sum() * LONGEST / length)
        row: dict[str, Any] = {
            "logp_rollout": said,
            "logp_train": trainer,
            "logp_sync": sync,
            "mask": np.ones(length),
            "version_rollout": drawn.astype(float) if len(np.unique(drawn)) > 1 else int(drawn[0]),
            "version_train": self.step,
            "token_ids": (pairs % VOCABULARY).astype(float),
            "reward": earned,
            "advantage": earned - 1 / VOCABULARY,
            "temperature": self.temperature,
            "top_p": self.top_p,
        }
        if self.top_k:
            row["top_k"] = self.top_k
        self._spoil(row, rng)
        return row

    def _draw(self, rng: np.random.Generator, drawn: np.ndarray, state: int) -> tuple[np.ndarray, np.ndarray]:
        """Flat (state, token) of each place, and the log-probability that the sampler reports. (T,) both"""
        pairs, said = [], []
        tables = {int(v): self._q(int(v), rng) for v in np.unique(drawn)}
        below = {v: np.cumsum(np.exp(q), axis=1)[:, :-1] for v, (q, _) in tables.items()}
        for version, uniform in zip(drawn.tolist(), rng.random(len(drawn)), strict=True):
            token = int((uniform >= below[version][state]).sum())
            pairs.append(state * VOCABULARY + token)
            said.append(tables[version][1][state, token])
            state = int(self.problem.transition[state, token])
        return np.array(pairs), np.array(said)

    def _spoil(self, row: dict[str, Any], rng: np.random.Generator) -> None:
        """What the cause does to the row itself."""
        q, length = row["logp_rollout"], len(row["logp_rollout"])
        if self.cause == "shift":
            for name in ("logp_train", "logp_sync"):
                row[name] = np.append(row[name][1:], row[name][-1])
        elif self.cause == "observation tokens":
            start, stop = length // 3, length // 3 + int(rng.integers(2, 5))
            q[start:stop] = 0.0
            for name in ("logp_train", "logp_sync"):
                row[name] = row[name].copy()
                row[name][start:stop] = -rng.uniform(1.5, 9, size=stop - start)
        elif self.cause == "EOS of 0.0":
            q[-1] = 0.0
            for name in ("logp_train", "logp_sync"):
                row[name] = np.append(row[name][:-1], -rng.uniform(2, 9))
        elif self.cause == "retokenised" and rng.random() < 0.2 + 0.4 * self.size:
            other = row["token_ids"].copy()
            other[int(rng.integers(2, length)) :] += 1
            row["trainer_token_ids"] = other
        elif self.cause == "bfloat16":
            row["logp_rollout"] = bfloat16(q)
        elif self.cause == "padding of -9999":
            q[int(rng.integers(length))] = -9999.0
        elif self.cause == "negative lag" and rng.random() < 0.15 + 0.3 * self.size:
            row["version_rollout"] = self.step + 1
        elif self.cause == "text encoded again" and rng.random() < 0.25 + 0.4 * self.size:
            at = int(rng.integers(2, length - 6))  # two tokens become one, and the last place is filled with something
            for name in ("logp_train", "logp_sync"):
                one = row[name][at] + row[name][at + 1] - rng.uniform(0, 2)
                row[name] = np.concatenate([row[name][:at], [one], row[name][at + 2 :], [-rng.exponential()]])
        elif self.cause == "weights as a mask":
            row["mask"] = row["mask"] * rng.uniform(0.2, 1.5)
        elif self.cause == "corrected twice":
            row["weight"] = np.exp(2 * (row["logp_train"] - q))
        elif self.cause == "published before applied":
            row["version_rollout"] = self.step
        elif self.cause == "weights arrive late":
            row["version_rollout"] = self.step
        elif self.cause == "old at current weights":
            row["logp_old"] = row["logp_train"]
            row["version_rollout"], row["version_train"] = self.step, self.step + 2
        elif self.cause == "reward collapses alone" and self.step >= 7:
            row["reward"] *= 0.1 + 0.2 * self.size
        row["logp_rollout"] = np.minimum(row["logp_rollout"], 0.0)


def bfloat16(x: np.ndarray) -> np.ndarray:
    """x rounded to bfloat16 (nearest, ties to even), as float64."""
    bits = np.asarray(x, np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)
    return rounded.view(np.float32).astype(float)


def _cut(q: np.ndarray, top_p: float, top_k: int) -> np.ndarray:
    """Top-p or top-k, renormalised; -inf outside. (S, V)"""
    order = np.argsort(-q, axis=1)
    ranked = np.take_along_axis(q, order, axis=1)
    before = np.cumsum(np.exp(ranked), axis=1) - np.exp(ranked)
    keep = before < top_p - 1e-12
    if top_k:
        keep &= np.arange(q.shape[1]) < top_k
    cut = np.full(q.shape, -math.inf)
    np.put_along_axis(cut, order, np.where(keep, ranked, -math.inf), axis=1)
    return cut - np.log(np.exp(cut).sum(axis=1, keepdims=True))
