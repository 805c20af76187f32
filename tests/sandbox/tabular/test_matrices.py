"""H, M and F: against enumeration, and every product against finite differences of exact updates and gradients."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_allclose

from sandbox.corrections import CORRECTIONS
from sandbox.errors import BadInput
from sandbox.tabular import exact, matrices, problems
from sandbox.tabular.policy import log_policy, policies, policies_of
from tests.sandbox.tabular.test_bias import central, examples
from tests.support import reference, strategies


def block_diagonal(blocks: np.ndarray) -> np.ndarray:
    states, n, _ = blocks.shape
    result = np.zeros((states, n, states, n))
    result[np.arange(states), :, np.arange(states), :] = blocks
    return result.reshape(states * n, states * n)


@given(strategies.problems_with_policies(), st.integers(0, 2**32))
def test_matrices_and_products_equal_enumeration(case, seed):
    problem, (pi, _, _) = case
    h, m, _, f = reference.lag_matrices(problem, pi)
    expected = {"H": h, "M": m, "F": f}
    ours = {
        "H": (block_diagonal(matrices.h_blocks(problem, pi)), matrices.h_product),
        "M": (matrices.m_dense(problem, pi), matrices.m_product),
        "F": (block_diagonal(matrices.f_blocks(problem, pi)), matrices.f_product),
    }
    x = np.random.default_rng(seed).normal(0.5, 1, problem.shape)
    spectrum = matrices.eigenvalues(problem, pi)
    for name, (dense, product) in ours.items():
        assert_allclose(dense, expected[name], rtol=1e-10, atol=1e-12, err_msg=name)
        result = product(problem, pi, x).ravel()
        assert_allclose(result, expected[name] @ x.ravel(), rtol=1e-10, atol=1e-11, err_msg=name)
        assert_allclose(spectrum[name], np.linalg.eigvalsh(expected[name]), rtol=1e-10, atol=1e-11, err_msg=name)


@pytest.mark.parametrize("example", range(3))
def test_products_equal_finite_differences(example):
    """H: of the uncorrected update; H + M: of the gradient of the return; F: of the expected score of the old policy,
    with the opposite sign."""
    problem, p, x = examples()[example]
    h, m, f = (product(problem, p, x) for product in (matrices.h_product, matrices.m_product, matrices.f_product))

    def uncorrected(y: np.ndarray) -> np.ndarray:
        return exact.expected_update(problem, policies(p + y, p), CORRECTIONS["none"])

    def gradient(y: np.ndarray) -> np.ndarray:
        return exact.gradient(problem, log_policy(p + y))

    def score(y: np.ndarray) -> np.ndarray:
        return exact.occupancy(problem, p)[:, None] * (np.exp(p) - np.exp(log_policy(p + y)))

    for function, expected in ((uncorrected, h), (gradient, h + m), (score, -f)):
        assert_allclose(central(function, x), expected, rtol=0, atol=1e-6 * np.abs(expected).max())


def test_f_is_the_curvature_of_the_kl_and_of_the_variance_of_the_log_ratio():
    for problem, p, x in examples():
        form = (x * matrices.f_product(problem, p, x)).sum()
        h = 1e-3
        moved = log_policy(p + h * x)
        assert_allclose(exact.kl(problem, p, moved) / h**2, form / 2, rtol=5e-3)
        assert_allclose(exact.variance_log_ratio(problem, moved, p) / h**2, form, rtol=5e-3)


def test_a_bandit_has_no_feedback():
    """THEORY section 5: with the mean baseline H = 0."""
    problem = problems.bandit([0.0, 1.0, 5.0])
    p = log_policy(np.array([[0.3, -0.2, 0.5]]))
    assert np.abs(matrices.h_blocks(problem, p)).max() < 1e-15
    assert np.abs(matrices.m_dense(problem, p)).max() > 0.1


def test_a_dense_m_that_is_too_large_is_refused_with_its_size():
    case = problems.PRESETS["sparse_tree"]()
    with pytest.raises(BadInput, match="5460 columns"):
        matrices.m_dense(case.problem, policies_of(case).sync)


def test_a_lag_of_lost_prefixes_grows_by_the_spectrum_of_h_and_not_under_exact_correction():
    case = problems.PRESETS["negative_prefixes"]()
    problem, eta, lost = case.problem, 0.05, 2
    mu = policies_of(case).sync
    top = matrices.eigenvalues(problem, mu)["H"][-1]
    # 31 visits at 2/3, each of advantage -1/3, softmax Fisher 1/3 at three equal tokens
    assert_allclose(top, 31 * 2 / 3 * 1 / 3 * 1 / 3, rtol=1e-12)
    for name, growth in (("none", 1 + eta * top), ("seq_is", 1.0), ("tis", 1.0)):
        x = 1e-4 * case.logits
        lags = [np.linalg.norm(x[lost])]
        for _ in range(8):
            three = policies(case.sampler_logits + x, case.sampler_logits)
            x = x + eta * exact.expected_update(problem, three, CORRECTIONS[name])
            lags.append(np.linalg.norm(x[lost]))
        assert_allclose(np.array(lags[1:]) / np.array(lags[:-1]), growth, rtol=1e-4, err_msg=name)
