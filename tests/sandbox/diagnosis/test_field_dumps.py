"""Dumps that practitioners report, by entry: what a diagnosis must say of each, and of a neighbour that is sound.

Every number was worked out from the entry's definition (kept mass, mean squares, Kish's formula), not by the code.
"""

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from benchmarks.synthetic import chunk
from sandbox.diagnosis.diagnose import diagnose

NAN, INF = math.nan, math.inf
FRESH = {"version_rollout": 4, "version_train": 4}


@dataclass(frozen=True)
class Case:
    """Rows, and what must be found, must not be found, and which numbers come out: by key, or `code.evidence`."""

    rows: list[dict[str, Any]]
    verdict: str = ""
    finds: tuple[str, ...] = ()
    never: tuple[str, ...] = ()
    values: dict[str, Any] = field(default_factory=dict)


def row(q: Any, sync: Any, train: Any = None, **more: Any) -> dict[str, Any]:
    """A response; `sync` is the trainer at the sampler's weights (the entries' L), `train` at the consumer's (N)."""
    q, sync = np.asarray(q, float), np.asarray(sync, float)
    return {"logp_rollout": q, "logp_sync": sync, "logp_train": sync if train is None else train, **more}


def logp(seed: int, n: int = 400, scale: float = 1.5) -> np.ndarray:
    return -np.random.default_rng(seed).exponential(scale, n) - 0.01


def noise(seed: int, n: int = 400, sd: float = 1.0) -> np.ndarray:
    return sd * np.random.default_rng(1000 + seed).standard_normal(n)


def softmax(logits: list[float], temperature: float = 1.0) -> np.ndarray:
    x = np.array(logits) / temperature
    return x - np.log(np.exp(x).sum())


def tempered(seed: int, temperature: float, tops: int = 0) -> list[dict[str, Any]]:
    """60 tokens of random distributions over nine tokens, drawn at `temperature`, which only the trainer's know of."""
    rng = np.random.default_rng(seed)
    rows = []
    for _ in range(6):
        raw = [softmax(rng.normal(0, 2, 9).tolist()) for _ in range(10)]
        hot = [softmax(x.tolist(), temperature) for x in raw]
        drawn = [rng.choice(9, p=np.exp(h)) for h in hot]
        at = [x[i] for x, i in zip(raw, drawn, strict=True)], [h[i] for h, i in zip(hot, drawn, strict=True)]
        more = {"temperature": temperature} | FRESH
        if tops:
            more |= {"top_rollout": [x[:tops].tolist() for x in raw], "top_train": [h[:tops].tolist() for h in hot]}
        rows.append(row(*at, **more))
    return rows


def check(case: Case) -> None:
    """Diagnose the rows and hold what is said against the case."""
    told = diagnose([chunk(case.rows)])
    codes = {f["code"]: {**f["evidence"], "severity": f["severity"]} for f in told["findings"]}
    assert {*case.finds} <= codes.keys(), codes
    assert not {*case.never} & codes.keys(), codes
    assert case.verdict in ("", told["verdict"]), (told["verdict"], codes)
    for path, right in case.values.items():
        first, *rest = path.split(".")
        value: Any = codes[first] if first in codes and first != "clip_budget" else told[first]
        for key in rest:
            value = [one[key] for one in value] if isinstance(value, list) else value[key]
        if isinstance(right, float):
            right = pytest.approx(right, abs=1e-6, nan_ok=True)
        assert value == right, (path, value)


def drawn_from_the_trainers(seed: int, sd: float) -> list[dict[str, Any]]:
    """3,000 tokens from random distributions; the sampler reports those of the same logits with noise added."""
    rng = np.random.default_rng(seed)
    rows = []
    for _ in range(60):
        true = [rng.normal(0, 2, 20) for _ in range(50)]
        drawn = [rng.choice(20, p=np.exp(softmax(x.tolist()))) for x in true]
        said = [softmax((x + rng.normal(0, sd, 20)).tolist())[i] for x, i in zip(true, drawn, strict=True)]
        rows.append(row(said, [softmax(x.tolist())[i] for x, i in zip(true, drawn, strict=True)]))
    return rows


X = np.array([-0.5, -2.0, -4.0])
P07 = row([-0.1] * 4, [-0.2] * 4, token_ids=[1, 2, 3, 4])
SURE = [-1e-6, -0.3]
A1_TO_A3 = {
    "P01": Case(
        [
            row(
                [-0.4076],
                [-0.1429],
                top_rollout=[softmax([2, 1, 0]).tolist()],
                top_train=[softmax([2, 1, 0], 0.5).tolist()],
            )
        ],
        "semantics",
        ("temperature",),
        values={"temperature.temperature_ratio": 0.5, "temperature.rms_after_tempering_nats": 0.0},
    ),
    "P01 top 4 of 9 at 0.6": Case(
        tempered(0, 0.6, tops=4),
        "semantics",
        ("temperature", "raw_logprobs"),
        values={"temperature.temperature_ratio": 0.6},
    ),
    "P01 sampled tokens alone": Case(tempered(1, 0.6), "semantics", ("temperature", "raw_logprobs")),
    "P01 reported of something else": Case(
        drawn_from_the_trainers(4, 0.3), "semantics", ("raw_logprobs",), ("temperature",)
    ),
    "P01 sound: both at 1": Case(tempered(2, 1.0, tops=9), "healthy", never=("temperature", "raw_logprobs")),
    "P02": Case(
        [row(X, softmax(X.tolist(), 0.7))],
        "semantics",
        ("temperature",),
        values={"temperature.temperature_ratio": 0.7, "temperature.correlation": 1.0},
    ),
    "P02 noisy, correlation .99": Case(
        [row(q := logp(0), np.minimum(q / 0.7 + noise(0, sd=0.05), 0))],
        "semantics",
        ("temperature",),
        values={"temperature.slope_of_trainer_on_sampler": pytest.approx(1 / 0.7, rel=0.02)},
    ),
    "P02 sound: noise alone": Case(
        [row(q := logp(1), np.minimum(q + noise(1, sd=0.05), 0))], "numerics", never=("temperature", "raw_logprobs")
    ),
    "P03": Case([row([-0.5, 0.0], [-0.6, 0.0], temperature=0.0)] * 3, "semantics", ("temperature",)),
    "P03 one greedy row of 30": Case(
        [row([-0.5], [-0.5], temperature=float(i > 0)) for i in range(30)], "healthy", ("temperature",)
    ),
    "P03 sound": Case([row([-0.5], [-0.5], temperature=1.0)] * 3, "healthy", never=("temperature",)),
    "P04": Case(
        [row([-0.4700, -0.9808], [-0.6931, -1.2040])],
        "semantics",
        ("truncated_support",),
        values={"truncated_support.kept_mass_mean": pytest.approx(0.8, abs=1e-4)},
    ),
    "P04 kept mass varies": Case(
        [row([-0.5] * 3, [-0.5513, -0.7231, -0.5])] * 20,
        "semantics",
        ("truncated_support",),
        values={"truncated_support.kept_mass_mean": pytest.approx((0.95 + 0.8 + 1) / 3, abs=1e-4)},
    ),
    "P04 declared, lag unknown": Case(
        [{"logp_rollout": [-0.47, -0.98], "logp_train": [-0.69, -1.2], "top_p": 0.8}] * 5,
        "semantics",
        ("truncated_support",),
    ),
    "P04 sound: d of both signs": Case(
        [row(q := logp(2, scale=0.5), np.minimum(q + noise(2, sd=0.1), 0))], "numerics", never=("truncated_support",)
    ),
    "P06": Case(
        [row([-0.1, -0.2, -0.3], [-0.1, -4, -0.3], token_ids=[11, 22, 33], trainer_token_ids=[11, 55, 33])],
        "semantics",
        ("ids_differ",),
        values={"n_tokens": 1, "discrepancy": 0.0, "ids_differ.tokens_left_out": 2},
    ),
    "P06 the trainer's are more": Case(
        [row([-0.1, -0.2], [-0.1, -0.2, -4, -5], token_ids=[11, 22], trainer_token_ids=[11, 22, 7, 8])],
        "semantics",
        ("ids_differ",),
        values={"n_tokens": 2, "discrepancy": 0.0, "ids_differ.tokens_left_out": 2},
    ),
    "P06 no ids in the dump": Case(
        [
            row(q := logp(i, 30), np.concatenate([q[:9], [-3.0], q[11:], [-0.7]]) if i % 3 else q, **FRESH)
            for i in range(12)
        ],
        "semantics",
        ("retokenised",),
        values={"retokenised.responses": 8},
    ),
    "P06 sound: one wild token": Case(
        [row(q := logp(i, 30), np.concatenate([q[:9], [-6.0], q[10:]]), **FRESH) for i in range(12)],
        never=("ids_differ", "retokenised", "shift"),
    ),
    "P07": Case(
        [P07 | {"logp_rollout": [-0.1] * 3}], "semantics", ("lengths_differ",), values={"n_tokens": 0, "n_responses": 0}
    ),
    "P07 one of many": Case(
        [P07] * 40 + [P07 | {"logp_train": [-0.1] * 5}], finds=("lengths_differ",), values={"n_responses": 40}
    ),
    "P07 sound": Case([P07], never=("lengths_differ",), values={"n_tokens": 4}),
    "P08": Case(
        [row([-0.1, -2.3, -0.05, -1.2], [-2.3, -0.05, -1.2, -0.7])],
        "semantics",
        ("shift",),
        values={"shift.mean_abs_aligned_nats": 0.0, "shift.n_tokens": 3},
    ),
    "P08 to the right": Case([row([-0.1, -2.3, -0.05, -1.2], [-0.7, -0.1, -2.3, -0.05])], "semantics", ("shift",)),
    "P08 by two": Case([row(q := logp(3, 40), np.append(q[2:], [-1.0, -0.5]))] * 2, "semantics", ("shift",)),
    "P08 sound: a token twice": Case([row([-0.1, -0.1, -2.3, -2.3], [-0.1, -0.15, -2.0, -2.4])], never=("shift",)),
    "P09": Case(
        [row([-0.2, -0.3, 0.0], [-0.2, -0.3, -4.60517], mask=[1, 1, 1])],
        "semantics",
        ("placeholder",),
        values={"n_tokens": 2, "ess.sequence.raw": 1.0, "total": 0.0},
    ),
    "P09 EOS of the trainer": Case(
        [row([-0.2, -5.0], [-0.2, 0.0])], "semantics", ("placeholder",), values={"n_tokens": 1}
    ),
    "P09 sound: p is 1": Case([row([0.0, -0.3], SURE)], "healthy", never=("placeholder",), values={"n_tokens": 2}),
    "P09 sound: one token allowed": Case([row([0.0], [-3.0], top_k=1)], never=("placeholder",)),
    "P10": Case(
        [row([-0.5, 0, 0, -0.7], [-0.5, -4, -6, -0.7], mask=[1, 0, 0, 1])],
        "healthy",
        never=("observation_tokens", "placeholder"),
        values={"discrepancy": 0.0, "n_tokens": 2},
    ),
    "P10 not masked": Case(
        [row([-0.5, 0, 0, -0.7], [-0.5, -4, -6, -0.7])],
        "semantics",
        ("observation_tokens",),
        values={"discrepancy": 0.0, "n_tokens": 2},
    ),
    "P10 masked ones set to 1": Case(
        [row([-0.5, 1, -0.7], [-0.5, -4, -0.7])], "semantics", ("placeholder",), values={"n_tokens": 2}
    ),
    "P11": Case(
        [row([-0.4, -9999, -0.6], [-0.4, -0.5, -0.6])],
        "semantics",
        ("placeholder",),
        values={"n_tokens": 2, "ess.token.raw": 1.0},
    ),
    "P11 in the trainer's": Case(
        [row([-0.4, -0.5], [-0.4, -9999])], "semantics", ("placeholder",), values={"n_tokens": 1}
    ),
    "P11 sound: unlikely, not impossible": Case([row([-40.0, -0.5], [-40.1, -0.5])], never=("placeholder",)),
    "P12": Case(
        [
            {"logp_rollout": [-0.4, None, -0.6], "logp_train": [-0.4, -0.5, -0.6]},
            {"logp_rollout": [NAN] * 3, "logp_train": [-0.4, -0.5, -0.6]},
        ],
        "semantics",
        ("missing_logprob", "nonfinite"),
        values={"n_tokens": 2, "n_responses": 1, "ess.token.raw": 1.0},
    ),
    "P12 one nan is the row": Case(
        [row([-0.4, NAN], [-0.4, -0.5])] * 2, "semantics", ("nonfinite",), values={"n_tokens": 0}
    ),
    "P12 sound: nan under the mask": Case(
        [row([-0.4, NAN], [-0.4, NAN], mask=[1, 0])], "healthy", never=("nonfinite",)
    ),
    "P13 a": Case(
        [row([-0.7], [-0.7], [x], **FRESH) for x in (-0.7, -0.7, -INF, -0.7)],
        finds=("zero_probability",),
        never=("nonfinite",),
        values={"ess.sequence.raw": 0.75, "ess.sequence.n": 4},
    ),
    "P13 b": Case([row([-INF, -0.7], [-0.7, -0.7])], "semantics", ("nonfinite",), values={"n_tokens": 0}),
    "P13 c": Case([row([-0.7], [0.03])], "semantics", ("positive_logprob",), values={"n_tokens": 0}),
    "P13 sound: rounding above 0": Case([row([1e-6], [2e-6])], "healthy", never=("positive_logprob",)),
}


@pytest.mark.parametrize("name", A1_TO_A3)
def test_semantics_and_data(name: str):
    check(A1_TO_A3[name])


@pytest.mark.parametrize("name", ["P04", "P08"])
def test_p05_the_backend_before_the_correction(name: str):
    told = diagnose([chunk(A1_TO_A3[name].rows)])
    assert told["corrections"] == []
    assert told["advice"][-1].startswith("Mend this first")


def test_p05_sound_a_backend_that_is_right_gets_its_corrections():
    q = [logp(seed, 50) for seed in range(40)]
    stale = [np.minimum(x + noise(seed, 50, 0.2), -1e-6) for seed, x in enumerate(q)]
    told = diagnose([chunk([row(x, x, y, version_rollout=3, version_train=4) for x, y in zip(q, stale, strict=True)])])
    assert told["verdict"] == "lag"
    assert told["corrections"]
    assert not any(line.startswith("Mend this first") for line in told["advice"])
