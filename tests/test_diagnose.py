"""Reported cases with their right verdict and value, beside variants that must not be flagged; the battery, small."""

import math

import numpy as np
import pytest

from benchmarks import battery
from sandbox import judgement, semantics
from sandbox.diagnose import diagnose
from sandbox.rollouts import collect


def of(*rows):
    return diagnose(collect(list(rows)))


def codes(outcome):
    return {f["code"] for f in outcome["findings"]}


def row(q, mu, pi=None, **more):
    return {"logp_rollout": q, "logp_sync": mu, "logp_train": mu if pi is None else pi, **more}


def test_temperature_is_fitted_where_distributions_are_at_hand():  # P01
    logits = np.array([[2.0, 1.0, 0.0]])
    raw = logits - np.log(np.exp(logits).sum())
    tempered = 2 * logits - np.log(np.exp(2 * logits).sum())
    assert raw[0, 0] == pytest.approx(-0.4076, abs=1e-4)
    assert tempered[0, 0] == pytest.approx(-0.1429, abs=1e-4)
    assert semantics.fit_temperature(raw, tempered) == pytest.approx(0.5, rel=1e-5)
    assert semantics.fit_temperature(tempered, raw) == pytest.approx(2.0, rel=1e-5)
    assert semantics.fit_temperature(raw, raw) == pytest.approx(1.0, rel=1e-5)


def test_a_high_correlation_does_not_hide_a_temperature():  # P02
    rng = np.random.default_rng(0)
    q = -rng.exponential(1.5, 400)
    outcome = of(row(q, np.minimum(q / 0.7 + 0.05 * rng.standard_normal(400), 0)))
    finding = next(f for f in outcome["findings"] if f["code"] in ("temperature", "raw_logprobs"))
    assert outcome["verdict"] == "semantics"
    assert finding["evidence"]["slope"] == pytest.approx(1 / 0.7, rel=0.02)
    assert finding["evidence"]["correlation"] > 0.99
    noisy = of(row(q, np.minimum(q + 0.05 * rng.standard_normal(400), 0)))
    assert not codes(noisy) & {"temperature", "raw_logprobs"}


@pytest.mark.parametrize("d", [(math.log(0.8),) * 2, (-0.0513, -0.2231, 0.0)])
def test_truncated_support(d):  # P04
    q = np.array([-0.47, -0.9808, -0.3][: len(d)])
    outcome = of(*[row(q, q + np.array(d))] * 20)
    assert outcome["verdict"] == "semantics"
    finding = next(f for f in outcome["findings"] if f["code"] == "truncated_support")
    assert finding["evidence"]["kept_mass"] == pytest.approx(np.exp(d).mean(), rel=1e-12)
    assert ("varies by prefix: subtracting" in finding["message"]) == (len(set(d)) > 1)


@pytest.mark.parametrize("d", [0.05, 0.0])
def test_a_positive_or_no_offset_is_no_truncation(d):  # P49: the counter-case
    q = np.full(10, -1.0)
    outcome = of(row(q, q + d), row(np.full(100, -1.0), np.full(100, -1.0 + d)))
    assert "truncated_support" not in codes(outcome)
    assert outcome["ess"]["token"]["raw"] == pytest.approx(1.0)
    w = np.exp(d * np.array([10, 100]))
    assert outcome["ess"]["sequence"]["raw"] == pytest.approx(w.sum() ** 2 / (2 * (w**2).sum()))
    assert outcome["ess"]["sequence"]["raw"] == pytest.approx(0.511 if d else 1.0, abs=5e-4)


def test_shift():  # P08
    q = [-0.1, -2.3, -0.05, -1.2]
    finding = next(f for f in of(row(q, [-2.3, -0.05, -1.2, -0.7]))["findings"] if f["code"] == "shift")
    assert finding["evidence"]["aligned_mean_abs"] == 0.0
    assert finding["evidence"]["mean_abs"] == pytest.approx(1.525)
    assert finding["evidence"]["n_tokens"] == 3
    assert "left by 1" in finding["message"]
    right = of(row(q, [-0.7, -0.1, -2.3, -0.05]))
    assert "right by 1" in next(f["message"] for f in right["findings"] if f["code"] == "shift")
    assert "shift" not in codes(of(row(q, [-0.15, -2.0, -0.05, -1.5])))


@pytest.mark.parametrize(
    ("rows", "ess", "n"),
    [
        ([row([-0.2, -0.3, 0.0], [-0.2, -0.3, -4.60517])], 1.0, 2),  # P09
        ([row([-0.4, -9999, -0.6], [-0.4, -0.5, -0.6])], 1.0, 2),  # P11
        ([row([-0.4, None, -0.6], [-0.4, -0.5, -0.6]), row([math.nan] * 3, [-0.1] * 3)], 1.0, 2),  # P12
        (
            [row([-0.1, -0.2, -0.3], [-0.1, -4.0, -0.3], token_ids=[1, 2, 3], trainer_token_ids=[1, 5, 3])],
            1.0,
            1,
        ),  # P06
    ],
)
def test_bad_tokens_enter_no_number(rows, ess, n):
    outcome = of(*rows)
    assert outcome["n_tokens"] == n
    assert outcome["ess"]["token"]["raw"] == ess
    assert outcome["total"] == pytest.approx(0.0, abs=1e-20)
    assert outcome["refused"]


def test_a_token_that_the_trainer_rules_out_stays_in_n():  # P13 a
    outcome = of(*[row([-0.7], [x]) for x in (-0.7, -0.7, -math.inf, -0.7)])
    assert outcome["ess"]["sequence"]["raw"] == 0.75
    assert not outcome["refused"]


def test_the_split_with_its_cross_term():  # P48
    outcome = of(row([-1, -0.5, -2, -0.1], [-1.02, -0.49, -2.05, -0.10], [-0.90, -0.55, -1.70, -0.12]))
    assert outcome["discrepancy"] == pytest.approx(7.5e-4)
    assert outcome["lag"] == pytest.approx(0.035225)
    assert outcome["cross_term"] == pytest.approx(-0.01025)
    assert outcome["total"] == pytest.approx(0.025725)
    assert outcome["lag_share"] == pytest.approx(0.979, abs=5e-4)
    assert outcome["verdict"] == "lag"


def test_lag_zero_is_the_intercept_or_nothing_is_identified():  # P48, without logp_sync
    def stale(lag, square):
        q = np.full(50, -1.0)
        t = math.sqrt(square) * np.tile([1.0, -1.0], 25)
        return {"logp_rollout": q, "logp_train": q + t, "version_rollout": 5 - lag, "version_train": 5}

    outcome = of(stale(0, 1e-4), stale(1, 5e-4), stale(2, 1.7e-3))
    assert outcome["discrepancy"] == pytest.approx(1e-4)
    assert [x["lag_share"] for x in outcome["by_lag"]] == pytest.approx([0, 0.8, 0.941], abs=5e-4)
    assert of(stale(1, 5e-4), stale(2, 1.7e-3))["verdict"] == "not_identifiable"


def test_frozen_weights_leave_only_numerics():  # P47
    q = np.array([-1.0, -0.5, -2.0, -0.1])
    outcome = of(row(q, q + np.array([0.03, -0.02, 0.05, 0.0])))
    assert outcome["lag_share"] == 0.0
    assert "clip_budget" not in codes(outcome)
    assert outcome["discrepancy"] == pytest.approx((0.03**2 + 0.02**2 + 0.05**2) / 4)
    assert outcome["kl_sampler_train"]["k3"] < 5e-4  # so small that it is no trouble
    assert outcome["verdict"] == "healthy"
    wide = of(row(q, q + np.array([0.03, -0.3, 0.05, 0.0])))
    assert wide["verdict"] == "numerics"
    spent = next(f for f in wide["findings"] if f["code"] == "clip_budget")
    assert spent["evidence"]["share_outside"] == 0.25


def test_old_at_current_weights_is_not_identifiable():  # P37
    stale = {"logp_rollout": [-1.0], "logp_train": [-0.7], "version_rollout": 5, "version_train": 8}
    outcome = of(stale | {"logp_old": [-0.7]})
    assert outcome["verdict"] == "not_identifiable"
    assert "recomputed_old" in codes(outcome)
    assert math.isnan(outcome["discrepancy"])
    assert "recomputed_old" not in codes(of(stale | {"logp_old": [-0.7], "version_rollout": 8}))


def test_a_correction_applied_twice():  # P38
    once = {"logp_rollout": [math.log(0.5)], "logp_sync": [math.log(0.5)], "logp_train": [math.log(0.75)]}
    assert of(once | {"weight": 2.25})["verdict"] == "semantics"
    assert "double_correction" not in codes(of(once | {"weight": 1.5}))


def test_lag_counts_from_generation_to_consumption():  # P40, P42, P44
    one = row([-0.1] * 3, [-0.1] * 3)
    assert of(one | {"version_rollout": 5, "version_train": 8})["lag_versions"]["mean"] == 3
    some = of(one | {"version_rollout": [5, None, 6], "version_train": 6})
    assert some["lag_versions"]["mean"] == 0.5
    assert some["lag_versions"]["coverage"] == pytest.approx(2 / 3)
    assert {"missing_version", "mixed_versions"} <= codes(some)
    four = [of(one | {"version_rollout": 5, "version_train": 6 + k})["lag_versions"]["mean"] for k in range(4)]
    assert four == [1, 2, 3, 4]
    assert not {"missing_version", "mixed_versions"} & codes(of(one | {"version_rollout": 6, "version_train": 6}))


def test_bfloat16_grid_states_its_resolution():  # P51
    rng = np.random.default_rng(1)
    mu = -1 - rng.random(60)
    finding = next(f for f in of(row(battery.bfloat16(mu), mu))["findings"] if f["code"] == "low_precision_grid")
    assert finding["evidence"]["resolution"] == pytest.approx(2**-7)  # between 1 and 2
    assert "low_precision_grid" not in codes(of(row(mu, mu)))
    assert "low_precision_grid" not in codes(of(row(np.tile([-0.5, -1.0], 30), np.tile([-0.5, -1.0], 30))))


def test_ranks_are_not_averaged():  # P20 to P23
    heavy = [row([-3.0], [-3.0 + x], rank=r) for r, x in ((0, 0.0), (0, 0.0), (1, 2.0), (1, 2.0))]
    finding = next(f for f in of(*heavy)["findings"] if f["code"] == "per_rank_ess")
    w = np.exp([0, 0, 2.0, 2.0])
    assert finding["evidence"] == {
        "mean_of_ranks": pytest.approx(1.0),
        "global": pytest.approx(w.sum() ** 2 / (4 * (w**2).sum())),
    }
    assert "per_rank_ess" not in codes(of(*[row([-3.0], [-3.0], rank=r) for r in (0, 0, 1, 1)]))


def test_levels_and_collapse():  # P55
    assert judgement.reference_level(1e-2)["position"] == {"dense": "above", "mixture of experts": "within"}
    assert judgement.reference_level(1e-4)["position"] == {"dense": "within", "mixture of experts": "below"}
    rng = np.random.default_rng(2)
    rows = []
    for k in range(1, 9):  # Var of the log ratio is 1e-4 k^2: ln 2 at 83.3
        x = rng.standard_normal(1000)
        for value in 0.01 * k * (x - x.mean()) / x.std():
            rows.append(row([-1.0], [-1.0], [-1.0 + value], version_rollout=0, version_train=k))
    prediction = of(*rows)["collapse_prediction"]
    assert prediction["ess_step"] == pytest.approx(math.sqrt(math.log(2) / 1e-4), abs=1)
    assert prediction["sync_period"] == math.ceil(prediction["ess_step"]) - 1


@pytest.mark.parametrize("cause", battery.CAUSES)
def test_battery(cause):
    verdict, right, found = battery.judged(battery.dump(cause, 0), cause)
    assert right, (verdict, found)


@pytest.mark.parametrize(
    ("cause", "others"),
    [
        ("numerics", {"mixture_tail", "discrepancy_not_constant", "hidden_staleness", "low_precision_grid"}),
        ("healthy", {"prediction_failed", "ess_collapse", "temperature", "truncated_support", "shift"}),
        ("growing discrepancy", {"hidden_staleness"}),
        ("lag", {"hidden_staleness", "recomputed_old", "temperature", "raw_logprobs"}),
    ],
)
def test_counter_cases(cause, others):
    assert not others & set(battery.judged(battery.dump(cause, 1), cause)[2])
