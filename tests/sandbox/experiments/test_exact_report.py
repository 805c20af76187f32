"""Every key of `mismatch exact` against enumeration of all sequences."""

import math
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from numpy.testing import assert_allclose

from sandbox.experiments import exact_report
from sandbox.tabular import problems, recursions
from sandbox.tabular.policy import policies_of
from sandbox.tabular.problems import Case
from tests.support import reference, strategies

KEYS = {
    "return_train": (), "return_sampler": (), "ess": ("lag", "discrepancy", "total", "lag_under_sampler"),
    "renyi2": ("lag", "discrepancy", "total"), "kl_train_sampler": (), "kl_sampler_train": (),
    "token_kl_on_sampler_prefixes": (), "gradient": (),
    "expected_update": ("none", "tis", "icepop", "cis", "dlc", "seq_is"),
    "bias": ("none", "tis", "icepop", "cis", "dlc", "seq_is"),
    "discrepancy_bias": ("leading", "within_token", "prefix", "downstream", "total"),
    "lag_matrices": ("H", "M", "F"),
}  # fmt: skip


def enumerated(case: Case) -> dict:
    problem, (pi, mu, q) = case.problem, policies_of(case)
    size = {
        "lag": reference.ess(problem, pi, mu),
        "discrepancy": reference.ess(problem, mu, q),
        "total": reference.ess(problem, pi, q),
    }
    gradient = reference.expected_update(problem, pi, pi, pi, "none")
    updates = {c: reference.expected_update(problem, pi, mu, q, c) for c in exact_report.CORRECTIONS}
    parts = reference.bias_split(problem, mu, -case.sampler_log_offset)
    h, m, _, f = reference.lag_matrices(problem, mu)
    return {
        "return_train": reference.returns(problem, pi),
        "return_sampler": reference.returns(problem, q),
        "ess": size | {"lag_under_sampler": reference.lag_ess_under_sampler(problem, pi, mu, q)},
        "renyi2": {name: -math.log(value) for name, value in size.items()},
        "kl_train_sampler": reference.kl(problem, pi, q),
        "kl_sampler_train": reference.kl(problem, q, pi),
        "token_kl_on_sampler_prefixes": reference.token_kl(problem, pi, q),
        "gradient": gradient,
        "expected_update": updates,
        "bias": {name: update - gradient for name, update in updates.items()},
        "discrepancy_bias": parts | {"total": sum(parts.values())},
        "lag_matrices": {"H": np.linalg.eigvalsh(h), "M": np.linalg.eigvalsh(m), "F": np.linalg.eigvalsh(f)},
    }


@pytest.mark.parametrize("small", [True, False])
@given(case=strategies.cases())
def test_every_key_equals_enumeration_on_both_routes(case, small):
    with mock.patch.object(recursions, "small", return_value=small):
        result = exact_report.summary(case, with_matrices=True)
    assert {k: tuple(v) if isinstance(v, dict) else () for k, v in result.items()} == KEYS
    for key, expected in enumerated(case).items():
        pairs = [(f"{key}.{k}", result[key][k], expected[k]) for k in expected] if isinstance(expected, dict) else [
            (key, result[key], expected)
        ]  # fmt: skip
        for name, got, value in pairs:
            assert_allclose(got, value, rtol=1e-10, atol=1e-11, err_msg=name)


def test_matrices_only_where_asked_for():
    case = problems.PRESETS["bandit"]()
    assert set(KEYS) - set(exact_report.summary(case)) == {"lag_matrices"}


def test_the_bandit_in_fractions():
    """P(better arm): trainer 1/2, sampler's weights 1/3, what the sampler draws from 3/7. Rewards 0 and 1."""
    result = exact_report.summary(problems.PRESETS["bandit"](), with_matrices=True)
    p, m, q = 1 / 2, 1 / 3, 3 / 7
    assert_allclose([result["return_train"], result["return_sampler"]], [p, q], rtol=1e-14)
    assert_allclose(result["ess"]["lag"], 1 / (p**2 / m + (1 - p) ** 2 / (1 - m)), rtol=1e-14)
    assert_allclose(result["ess"]["lag"], 8 / 9, rtol=1e-14)
    assert_allclose(result["ess"]["discrepancy"], 27 / 28, rtol=1e-14)
    assert_allclose(result["ess"]["total"], 48 / 49, rtol=1e-14)
    r, s = p / m, (1 - p) / (1 - m)
    seen = (q * r + (1 - q) * s) ** 2 / (q * r**2 + (1 - q) * s**2)
    assert_allclose(result["ess"]["lag_under_sampler"], seen, rtol=1e-14)
    assert_allclose(result["kl_train_sampler"], p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q)), rtol=1e-13)
    assert_allclose(result["gradient"], [[-p * (1 - p), p * (1 - p)]], rtol=1e-14)
    # Uncorrected: E_q[(R - q)(e_a - p)] = q (1 - q) on the better arm, whatever p.
    assert_allclose(result["expected_update"]["none"][0, 1], q * (1 - q), rtol=1e-14)
    # A small discrepancy d = -(0, ln 3/2), centred: the better arm's log-odds move by -d.
    assert_allclose(result["discrepancy_bias"]["total"][0, 1], m * (1 - m) * (1 - 2 * m) * math.log(1.5), rtol=1e-13)
    # Hessian of m along its logit is m (1 - m)(1 - 2 m) = M; F = m (1 - m); each twice, for (1, -1) over two logits.
    assert_allclose(result["lag_matrices"]["M"], [0, 2 * m * (1 - m) * (1 - 2 * m)], atol=1e-15)
    assert_allclose(result["lag_matrices"]["F"], [0, 2 * m * (1 - m)], atol=1e-15)
    assert_allclose(result["lag_matrices"]["H"], 0, atol=1e-15)


def test_hidden_collapse_looks_healthy_per_token():
    result = exact_report.summary(problems.PRESETS["hidden_collapse"]())
    assert 0.004 < result["token_kl_on_sampler_prefixes"] < 0.006
    assert result["ess"]["lag"] < 0.5
    assert result["ess"]["total"] < 0.5


def test_long_loses_its_ess_to_a_discrepancy_that_no_token_shows():
    result = exact_report.summary(problems.PRESETS["long"]())
    assert_allclose(result["token_kl_on_sampler_prefixes"], 1.8e-4, rtol=0.1)
    assert 0.15 < result["ess"]["discrepancy"] < 0.3
    assert_allclose(result["ess"]["lag"], 1.0, rtol=1e-11)


def test_nothing_overflows_at_65536_tokens_with_an_ess_of_e_to_the_minus_500():
    rng = np.random.default_rng(5)
    machine = problems.state_machine(rng, 4, 3, 2**16)
    sampler = rng.normal(size=machine.shape)
    case = Case(machine, sampler + 0.01, sampler, 0.189 * rng.normal(size=machine.shape))
    _, mu, q = policies_of(case)
    result = exact_report.summary(case)
    assert_allclose(result["renyi2"]["discrepancy"], reference.long_log_sum(machine, 2 * mu - q), rtol=1e-10)
    assert 450 < result["renyi2"]["discrepancy"] < 550
    assert_allclose(math.log(result["ess"]["discrepancy"]), -result["renyi2"]["discrepancy"], rtol=1e-14)
    for value in (*result["expected_update"].values(), *result["discrepancy_bias"].values(), result["gradient"]):
        assert np.isfinite(value).all()
        assert np.any(value != 0)


def test_tables_for_people_show_every_correction_part_and_matrix():
    shown = exact_report.tables(exact_report.summary(problems.PRESETS["machine"](), with_matrices=True))
    first = {next(iter(row.values())) for rows in shown.values() for row in rows}
    assert first >= {*exact_report.CORRECTIONS, *KEYS["discrepancy_bias"], *KEYS["lag_matrices"], *KEYS["ess"]}
    left = {row["part"]: row["left by"] for rows in shown.values() for row in rows if "part" in row}
    assert left["leading"] == "none"
    assert left["within_token"] == "none, dlc"
    assert left["prefix"] == left["downstream"] == "none, tis, icepop, cis, dlc"
