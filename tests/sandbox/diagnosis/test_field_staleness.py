"""Dumps that practitioners report, of staleness and numerics, by entry; and classes of which no example is printed."""

import math
from typing import Any

import numpy as np
import pytest

from benchmarks.synthetic import bfloat16, chunk
from sandbox.diagnosis.diagnose import diagnose
from tests.sandbox.diagnosis.test_field_dumps import FRESH, NAN, Case, check, logp, noise, row


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
    "P42 sound": Case(
        [ONE | {"version_rollout": [5, 6, 6], "version_train": 6}],
        never=("missing_version", "negative_lag"),
        values={"staleness.mean": 1 / 3, "staleness.coverage": 1.0},
    ),
    "P44 all of it continued rollouts": Case(
        [ONE | {"version_rollout": [4, 5, 5], "version_train": 6 + k, "step": k} for k in range(2)],
        finds=("mixed_versions",),
        values={"by_step.mean_lag": [pytest.approx(4 / 3), pytest.approx(7 / 3)]},
    ),
    "P44 sound: one step a batch": Case(
        [ONE | {"version_rollout": k, "version_train": k + 1, "step": k} for k in range(4)],
        never=("stuck_version", "mixed_versions"),
        values={"by_step.mean_lag": [1.0] * 4},
    ),
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
    "P46 short ones dropped": Case(
        [row(logp(i, n), logp(i, n), mask=[int(n > 50)] * n) for i, n in enumerate([20] * 5 + [90] * 10)],
        values={"discarded_responses.severity": "warning", "discarded_responses.mean_length_dropped": 20.0},
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
    "P49 sound: signs that cancel": Case(
        [row([-1.0] * n, -1 + 0.05 * np.tile([1.0, -1.0], n // 2)) for n in (10, 100)],
        values={"ess.sequence.raw": 1.0, "discrepancy": 0.05**2},
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
    "P54 by position": Case(
        [
            row(
                q := logp(i, 200), np.minimum(q + np.linspace(0.01, 0.2, 200) * np.expm1(q) * noise(i, 200), 0), **FRESH
            )
            for i in range(40)
        ],
        finds=("discrepancy_not_constant",),
        never=("hidden_staleness",),
        values={"constancy.position.varies": True},
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
    "P55 beyond all that is reported": Case(
        [row(q := logp(7) - 2, q + noise(7, sd=0.6))],
        "numerics",
        values={"reference_levels.moe": "above", "reference_levels.group": "beyond all reported"},
    ),
    "P56 sound: the ESS had warned": Case(
        [
            row(
                q := logp(s * 64 + i, 9) - 3,
                q,
                q + 0.3 * max(s - 3, 0) * (i % 8 == 0),
                step=s,
                reward=float(i < (45 if s < 8 else 1)),
            )
            for s in range(12)
            for i in range(64)
        ],
        never=("prediction_failed",),
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


@pytest.mark.parametrize("name", [*A8_A9, *CLASSES])
def test_staleness_and_numerics(name: str):
    check((A8_A9 | CLASSES)[name])


def test_p51_advice_is_two_sided():
    told = diagnose([chunk(A8_A9["P47 outside the band"].rows)])
    assert any("on both sides (on one side alone the difference grows)" in line for line in told["advice"])


def test_p52_a_merged_adapter_in_bfloat16():
    assert bfloat16(np.array([1.0, -0.5]) + 0.001).tolist() == [1.0, -0.498046875]
