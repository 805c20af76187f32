"""Dumps that practitioners report, by entry: what a diagnosis must say of each, and of a neighbour that is sound.

Every number was worked out from the entry's definition (kept mass, mean squares, Kish's formula), not by the code.
"""

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from benchmarks.synthetic import bfloat16, chunk
from sandbox.diagnose import diagnose

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


def stale(lag: int, square: float, seed: int = 0) -> dict[str, Any]:
    """50 tokens of lag `lag` whose mean t^2 is `square`, signs alternating."""
    q = np.full(50, -1.0)
    t = math.sqrt(square) * np.tile([1.0, -1.0], 25)
    return {"logp_rollout": q, "logp_train": q + t, "version_rollout": 5 - lag, "version_train": 5}


def steps(sd: Any, seed: int = 0, n: int = 24, **more: Any) -> list[dict[str, Any]]:
    """12 steps of n responses of 40 tokens at declared lag 0; sd(step, i) of d at surprise 1."""
    rows = []
    for step in range(12):
        for i in range(n):
            q = logp(seed * 10_000 + step * n + i, 40)
            mu = np.minimum(q + sd(step, i) * np.expm1(q) * noise(seed * 10_000 + step * n + i, 40), 0)
            rows.append(row(q, mu, step=step, version_rollout=step, version_train=step, **more))
    return rows


ONE = row([-0.1] * 3, [-0.1] * 3)
Q48, L48, N48 = [-1, -0.5, -2, -0.1], [-1.02, -0.49, -2.05, -0.10], [-0.90, -0.55, -1.70, -0.12]
Q47 = np.array([-1.0, -0.5, -2.0, -0.1])
A8_A9 = {
    "P37": Case(
        [{"logp_rollout": [-1.0], "logp_train": [-0.7], "logp_old": [-0.7], "version_rollout": 5, "version_train": 8}],
        "not_identifiable",
        ("recomputed_old",),
        values={"discrepancy": NAN, "lag": NAN, "lag_share": NAN},
    ),
    "P37 sound: same version": Case(
        [{"logp_rollout": [-1.0], "logp_train": [-0.7], "logp_old": [-0.7]} | FRESH],
        "numerics",
        never=("recomputed_old",),
    ),
    "P38": Case(
        [row([math.log(0.5)], [math.log(0.5)], [math.log(0.75)], weight=[2.25], **FRESH)],
        "semantics",
        ("double_correction",),
        values={"double_correction.power_of_ratio": 2.0},
    ),
    "P38 sound: once": Case(
        [row([math.log(0.5)], [math.log(0.5)], [math.log(0.75)], weight=[1.5])], "lag", never=("double_correction",)
    ),
    "P38 bypass": Case(
        [row([-0.9, -0.5], [-0.9, -0.5], [-0.6, -0.4], logp_old=[-0.9, -0.5])], "lag", ("double_correction",)
    ),
    "P40": Case([ONE | {"version_rollout": 5, "version_train": 8}], values={"staleness.mean": 3.0, "staleness.max": 3}),
    "P40 a token a version": Case(
        [ONE | {"version_rollout": [5, 6, 7], "version_train": 8}],
        finds=("mixed_versions",),
        values={"staleness.mean": 2.0, "staleness.max": 3},
    ),
    "P40 sound": Case([ONE | FRESH], never=("missing_version", "mixed_versions"), values={"staleness.mean": 0.0}),
    "P42": Case(
        [ONE | {"version_rollout": [5, None, 6], "version_train": 6}],
        finds=("missing_version", "mixed_versions"),
        values={"staleness.mean": 0.5, "staleness.coverage": 2 / 3},
    ),
    "P42 a row without": Case(
        [row([-0.1], [-0.1], version_rollout=v, version_train=6) for v in (5, None, 6)],
        finds=("missing_version",),
        values={"staleness.mean": 0.5, "staleness.coverage": 2 / 3},
    ),
    "P42 constant stamp": Case(
        [ONE | {"version_rollout": 4, "version_train": 4, "step": s} for s in range(200, 210)], finds=("stuck_version",)
    ),
    "P42 negative": Case([ONE | {"version_rollout": 7, "version_train": 6}], "semantics", ("negative_lag",)),
    "P44": Case(
        [ONE | {"version_rollout": 5, "version_train": 6 + k, "step": k} for k in range(4)],
        never=("stuck_version", "negative_lag"),
        values={"staleness.mean": 2.5, "by_step.mean_lag": [1.0, 2.0, 3.0, 4.0]},
    ),
    "P46": Case(
        [row(logp(i, n), logp(i, n), mask=[int(n < 50)] * n) for i, n in enumerate([20] * 20 + [90] * 10)],
        finds=("discarded_responses",),
        values={
            "discarded_responses.mean_length_dropped": 90.0,
            "discarded_responses.mean_length_kept": 20.0,
            "discarded_responses.severity": "warning",
            "n_responses": 20,
            "ess.sequence.n": 20,
            "ess.sequence.chi2": 0.0,  # an empty row counts nowhere
        },
    ),
    "P46 sound: dropped alike": Case(
        [row(logp(i, 20), logp(i, 20), mask=[i % 3] * 20) for i in range(30)],
        values={"discarded_responses.severity": "info"},
    ),
    "P47": Case(
        [row(Q47, Q47 + np.array([0.03, -0.02, 0.05, 0.0]))],
        values={"lag_share": 0.0, "lag": 0.0, "discrepancy": 0.0038 / 4, "clip_budget.share_of_tokens": 0.0},
    ),
    "P47 outside the band": Case(
        [row(Q47, Q47 + np.array([0.03, -0.3, 0.05, 0.0]))],
        "numerics",
        ("clip_budget",),
        values={"clip_budget.share_of_tokens": 0.25},
    ),
    "P47 lr 0, old recomputed": Case([row(Q47, Q47, logp_old=Q47) | FRESH], "healthy", never=("recomputed_old",)),
    "P48": Case(
        [row(Q48, L48, N48)],
        "lag",
        values={
            "discrepancy": 7.5e-4,
            "lag": 0.035225,
            "cross_term": -0.01025,
            "total": 0.025725,
            "lag_share": pytest.approx(0.979, abs=5e-4),
        },
    ),
    "P48 intercept": Case(
        [stale(0, 1e-4), stale(1, 5e-4), stale(2, 1.7e-3)],
        values={"discrepancy": 1e-4, "by_lag.lag_share": pytest.approx([0, 0.8, 0.941], abs=5e-4)},
    ),
    "P48 no lag 0": Case([stale(1, 5e-4), stale(2, 1.7e-3)], "not_identifiable", values={"discrepancy": NAN}),
    "P49": Case(
        [row([-1.0] * n, [-0.95] * n) for n in (10, 100)],
        never=("truncated_support", "temperature"),
        values={
            "ess.token.raw": 1.0,
            "ess.sequence.raw": pytest.approx(0.511, abs=5e-4),
            "ess.sequence_after_mean.raw": 1.0,
        },
    ),
    "P49 one length": Case([row([-1.0] * 50, [-0.95] * 50)] * 2, values={"ess.sequence.raw": 1.0}),
    "P51": Case(
        [row(bfloat16(q := -1 - np.random.default_rng(0).random(80)), q)],
        finds=("low_precision_grid",),
        values={"low_precision_grid.resolution_between_1_and_2_nats": 2.0**-7, "low_precision_grid.type": "bfloat16"},
    ),
    "P51 float32 is no grid": Case(
        [row(np.float32(q := -1 - np.random.default_rng(0).random(80)), q)], never=("low_precision_grid",)
    ),
    "P51 few values, all round": Case([row([-0.5, -1.0] * 40, [-0.5, -1.0] * 40)], never=("low_precision_grid",)),
    "P52": Case(
        steps(lambda step, i: 0.01 * (1 + step)), finds=("discrepancy_not_constant",), never=("hidden_staleness",)
    ),
    "P52 sound": Case(
        steps(lambda step, i: 0.03, 1), never=("discrepancy_not_constant", "hidden_staleness", "mixture_tail")
    ),
    "P54": Case(
        [
            row(q := logp(i, n), np.minimum(q + (0.2 if n > 100 else 0.01) * np.expm1(q) * noise(i, n), 0), **FRESH)
            for i, n in enumerate([30, 300] * 20)
        ],
        finds=("discrepancy_not_constant",),
    ),
    "P54 sound: length alone": Case(
        [
            row(q := logp(i, n), np.minimum(q + 0.05 * np.expm1(q) * noise(i, n), 0), **FRESH)
            for i, n in enumerate([30, 300] * 20)
        ],
        never=("discrepancy_not_constant",),
    ),
    "P55 usual of MoE": Case(
        [row(q := logp(5), np.minimum(q + noise(5, sd=0.1), 0))],
        values={"reference_levels.dense": "above", "reference_levels.moe": "within"},
    ),
    "P55 usual of dense": Case(
        [row(q := logp(6), np.minimum(q + noise(6, sd=0.02), 0))],
        "healthy",
        values={"reference_levels.dense": "within", "reference_levels.moe": "below"},
    ),
    "P56": Case(
        [
            row(logp(s * 64 + i, 9), logp(s * 64 + i, 9), step=s, reward=float(i < (45 if s < 6 else 1)))
            for s in range(12)
            for i in range(64)
        ],
        "prediction_failed",
        ("prediction_failed",),
        values={"prediction_failed.reward_after": 1 / 64, "prediction_failed.fell_at_step": 6},
    ),
    "P56 sound: a noisy reward": Case(
        [
            row(logp(s * 64 + i, 9), logp(s * 64 + i, 9), step=s, reward=float((i * 7 + s) % 3 == 0))
            for s in range(12)
            for i in range(64)
        ],
        "healthy",
        never=("prediction_failed",),
    ),
}

flips = np.random.default_rng(3)
MIXED = [
    row(
        q := logp(i, 60),
        np.minimum(q + np.where(flips.random(60) < 0.01, noise(i, 60), 0.003 * noise(i, 60)), 0),
        **FRESH,
    )
    for i in range(40)
]
CLASSES = {
    "hidden staleness that resets": Case(
        steps(lambda step, i: 0.01 * (1 + 3 * (step % 4)), 2), "hidden_staleness", ("hidden_staleness",)
    ),
    "published before applied": Case(
        steps(lambda step, i: 0.15 if i % 3 == 0 else 0.01, 3), "hidden_staleness", ("hidden_staleness",)
    ),
    "sound: one rank of two is worse": Case(
        [r | {"rank": k % 2} for k, r in enumerate(steps(lambda step, i: 0.15 if i % 2 else 0.01, 4))],
        never=("hidden_staleness",),
        finds=("discrepancy_not_constant",),
    ),
    "per-rank aggregation": Case(
        [row([-3.0], [-3.0 + x], rank=r) for r, x in ((0, 0.0), (0, 0.0), (1, 2.0), (1, 2.0))],
        finds=("per_rank_ess",),
        values={
            "per_rank_ess.mean_of_ranks": 1.0,
            "per_rank_ess.global": (2 + 2 * math.e**2) ** 2 / (8 + 8 * math.e**4),
        },
    ),
    "sound: ranks alike": Case([row([-3.0], [-3.0], rank=r) for r in (0, 0, 1, 1)], never=("per_rank_ess",)),
    "MoE mixture": Case(MIXED, finds=("mixture_tail",), never=("hidden_staleness",)),
    "sound: a policy that is nearly always sure": Case(
        # engines round logits: d is 0 wherever p is 1, which is no mixture
        [
            row(
                q := np.where(np.arange(60) % 20, -1e-5, -1.0 - noise(i, 60) ** 2),
                q + 0.03 * np.expm1(q) * noise(i, 60),
            )
            for i in range(200)
        ],
        never=("mixture_tail",),
    ),
    "sample weights as a mask": Case(
        [row([-0.5] * 4, [-0.5] * 4, mask=[w] * 4) for w in (0.3, 1.0, 0.7)], "semantics", ("not_a_mask",)
    ),
    "sound: a mask of numbers": Case([row([-0.5] * 4, [-0.5] * 4, mask=[1.0, 0.0, 1.0, 1.0])], never=("not_a_mask",)),
    "entropy": Case(
        [
            row(q := logp(i, 40), np.minimum(q + h * np.expm1(q) * noise(i, 40), 0), entropy=h * 10, **FRESH)
            for i in range(40)
            for h in [np.repeat([0.02, 0.2], 20)]
        ],
        finds=("discrepancy_not_constant",),
        values={"constancy.entropy.varies": True},
    ),
    "duplicates": Case([ONE | {"sample_id": 3, "step": 1}] * 2, "semantics", ("duplicate",), values={"n_responses": 1}),
    "sound: the next step": Case([ONE | {"sample_id": 3, "step": s} for s in (1, 2)], never=("duplicate",)),
}


@pytest.mark.parametrize("name", [*A1_TO_A3, *A8_A9, *CLASSES])
def test_field_dump(name: str):
    case = (A1_TO_A3 | A8_A9 | CLASSES)[name]
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


def test_p05_the_backend_before_the_correction():
    told = diagnose([chunk(A1_TO_A3["P04"].rows)])
    assert told["corrections"] == []
    assert told["advice"][-1].startswith("Correct nothing")


def test_p51_advice_is_two_sided():
    told = diagnose([chunk(A8_A9["P47 outside the band"].rows)])
    assert any("on both sides alike" in line for line in told["advice"])


def test_p52_a_merged_adapter_in_bfloat16():
    assert bfloat16(np.array([1.0, -0.5]) + 0.001).tolist() == [1.0, -0.498046875]
