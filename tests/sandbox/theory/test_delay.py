"""Constant pipeline lag: roots against the recursion, against scalar polynomials, against the closed form."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_allclose

from sandbox.errors import BadInput
from sandbox.theory import delay


def stable_pair(seed: int, n: int = 3) -> tuple[np.ndarray, np.ndarray]:
    """H and M, asymmetric, not commuting, H + M stable."""
    rng = np.random.default_rng(seed)
    h, m = 0.25 * rng.normal(size=(2, n, n))
    return h - 0.5 * np.eye(n), m - 1.2 * np.eye(n)


@pytest.mark.parametrize("tau", [0, 1, 2, 3, 7, 20])
def test_root_finding_gives_the_closed_form(tau):
    kappa = 0.37
    assert_allclose(delay.critical_step_size(0.0, -kappa, tau) * kappa, delay.critical_gain(tau), rtol=1e-9)


def test_critical_gains_of_theory_section_5():
    assert_allclose([delay.critical_gain(tau) for tau in range(4)], [2, 1, 0.618, 0.445], atol=5e-4)


@given(st.floats(-1.5, 0.4), st.floats(-1.5, 0.8), st.floats(0.1, 1.5), st.integers(0, 5))
def test_scalar_roots_are_those_of_the_polynomial(h, m, eta, tau):
    """z^{tau+1} - (1 + eta h) z^tau - eta m, by numpy's own polynomial evaluation at each root."""
    coefficients = np.zeros(tau + 2)
    coefficients[0] = 1
    coefficients[1] -= 1 + eta * h
    coefficients[-1] -= eta * m
    values = np.polyval(coefficients, delay.roots(h, m, eta, tau))
    assert_allclose(values, 0, atol=1e-10)


@given(st.integers(0, 2**32), st.integers(0, 4), st.floats(0.05, 0.8))
def test_roots_make_the_matrix_polynomial_singular(seed, tau, eta):
    h, m = stable_pair(seed)
    for z in delay.roots(h, m, eta, tau):
        matrix = z ** (tau + 1) * np.eye(3) - (np.eye(3) + eta * h) * z**tau - eta * m
        assert np.linalg.svd(matrix, compute_uv=False)[-1] < 1e-6


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("tau", [0, 1, 3])
@pytest.mark.parametrize("share", [0.5, 1.3])
def test_the_recursion_grows_at_the_spectral_radius(seed, tau, share):
    h, m = stable_pair(seed)
    eta = share * delay.critical_step_size(h, m, tau)
    radius = delay.spectral_radius(h, m, eta, tau)
    assert (radius < 1) == (share < 1)
    start = np.random.default_rng(seed).normal(size=3)
    path = delay.recursion(h, m, 0.0, eta, tau, start, 400)
    # Underflow and overflow end the range in which the slope is there to be seen.
    size = np.abs(path).max(axis=1)
    path = path[(size > 1e-140) & (size < 1e140)]
    # Factor per update of |path|, from the slope of its logarithm over the later half.
    later = np.log(np.linalg.norm(path, axis=1))[len(path) // 2 :]
    assert_allclose(np.exp(np.polyfit(np.arange(len(later)), later, 1)[0]), radius, rtol=3e-3)


@given(st.integers(0, 2**32), st.integers(0, 4))
def test_the_spectral_radius_is_one_at_the_critical_step_and_below_before(seed, tau):
    h, m = stable_pair(seed)
    critical = delay.critical_step_size(h, m, tau)
    if not 0 < critical < math.inf:
        return
    assert_allclose(delay.spectral_radius(h, m, critical, tau), 1, atol=1e-9)
    assert delay.spectral_radius(h, m, 0.97 * critical, tau) < 1
    assert delay.spectral_radius(h, m, 1.01 * critical, tau) > 1


def test_critical_step_without_delay_is_that_of_gradient_ascent():
    h, m = stable_pair(5)
    values = np.linalg.eigvals(h + m)
    expected = min(-2 * v.real / abs(v) ** 2 for v in values)
    assert_allclose(delay.critical_step_size(h, m, 0), expected, rtol=1e-9)


def test_directions_that_nothing_moves_do_not_hide_stability():
    inner = np.diag([-1.0, -0.5]), np.diag([-0.2, -0.4])
    basis = np.linalg.qr(np.random.default_rng(0).normal(size=(4, 4)))[0][:, :2]
    h, m = (basis @ x @ basis.T for x in inner)
    assert_allclose(delay.critical_step_size(h, m, 2), delay.critical_step_size(*inner, 2), rtol=1e-9)
    assert delay.without_null(h, m)[0].shape == (2, 2)
    assert delay.critical_step_size(np.zeros((2, 2)), np.zeros((2, 2)), 1) == math.inf
    assert delay.critical_tau(0.0, 0.0, 1.0) == math.inf


def test_a_fixed_point_that_repels_has_no_stable_step():
    assert delay.critical_step_size(0.3, -0.2, 1) == 0
    assert delay.critical_tau(0.3, -0.2, 0.1) == -1


def test_critical_tau_is_where_the_gain_passes_the_closed_form():
    for tau in (1, 2, 3, 8):
        between = (delay.critical_gain(tau) + delay.critical_gain(tau + 1)) / 2
        assert delay.critical_tau(0.0, -between, 1.0) == tau
    assert delay.critical_tau(0.0, -1e-6, 1.0, most=20) == math.inf
    assert delay.critical_tau(0.0, -0.7, 1.0, most=2) == 1  # lag 2 itself is looked at: .7 is above its .618
    assert delay.critical_tau(0.0, -0.7, 1.0, most=1) == math.inf


@pytest.mark.parametrize("tau", [0, 2])
def test_a_constant_push_settles_where_the_feedback_balances_it(tau):
    """theta = -(H + M)^-1 c, from either side."""
    h, m = stable_pair(0)
    constant = np.array([0.3, -0.2, 0.5])
    path = delay.recursion(h, m, constant, 0.3 * delay.critical_step_size(h, m, tau), tau, np.ones(3), 2000)
    assert_allclose(path[-1], -np.linalg.solve(h + m, constant), rtol=1e-9)


def test_a_delayed_penalty_at_the_fixed_point_goes_unstable_where_an_instant_one_does_not():
    """The same -beta F as H or as M: only as M does the lag see it."""
    fisher = np.diag([0.3, 0.1])
    assert delay.spectral_radius(-5 * fisher, 0 * fisher, 1.0, 3) < 1
    assert delay.spectral_radius(0 * fisher, -5 * fisher, 1.0, 3) > 1


def test_constant_bias_grows_linearly_and_a_loop_geometrically():
    loop, bias = np.diag([0.2, -0.5]), np.array([0.01, 0.02])
    pushed, no_loop = (delay.recursion(x, 0 * x, bias, 0.5, 0, np.zeros(2), 100) for x in (loop, 0 * loop))
    assert_allclose(np.linalg.norm(no_loop, axis=1), 0.5 * np.hypot(0.01, 0.02) * np.arange(101))
    assert_allclose(pushed[-1], [0.01 * (1.1**100 - 1) / 0.2, 0.02 * (1 - 0.75**100) / 0.5])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: delay.critical_gain(-1), "tau is -1"),
        (lambda: delay.companion(np.zeros((2, 2)), np.zeros((3, 3)), 1.0, 1), "H has shape"),
        (lambda: delay.companion(np.zeros((2, 3)), np.zeros((2, 3)), 1.0, 1), "H has shape"),
        (lambda: delay.roots(math.nan, 0.0, 1.0, 1), "not finite"),
        (lambda: delay.companion(0.0, 0.0, 1.0, -2), "tau is -2"),
    ],
)
def test_bad_input(call, message):
    with pytest.raises(BadInput, match=message):
        call()
