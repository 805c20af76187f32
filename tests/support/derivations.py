"""The formulas in sympy, derived rather than typed: what the numeric code must agree with to rounding.

Two-armed bandit, arm 1 against arm 0, everything in closed form: bias under an offset, ESS, D2, loop gain, collapse
step. Then the second-order expansion behind Var[log w] = a k^2 + b k, the bound E_q[w^2] <= e^c of CIS, and Levin and
May's critical gain. Each function returns an expression in the symbols below; tests evaluate it at random points.
"""

from functools import cache
from typing import Any, NamedTuple

import sympy as sp

Expr = Any  # sympy's own annotations are too narrow for its results

P, Q, MU = sp.symbols("p q mu", positive=True)  # probability of arm 1: trainer, sampler, sampler's weights
R1, R0 = sp.symbols("r1 r0", real=True)  # rewards of the arms
ETA, CAP = sp.symbols("eta c", positive=True)  # step size; cap of CIS in log-odds
THRESHOLD = sp.Symbol("threshold", positive=True)
ESS = 1 / (P**2 / Q + (1 - P) ** 2 / (1 - Q))  # 1 / E_q[(p/q)^2] over the two arms
D2 = -sp.log(ESS)


def _mean(value_1: Expr, value_0: Expr, probability: Expr) -> Expr:
    return probability * value_1 + (1 - probability) * value_0


def _update(sampler: Expr, trainer: Expr, weight_1: Expr, weight_0: Expr) -> Expr:
    """Expected update of arm 1's logit: E[w (R - E[R]) (e_a - pi)], first component; the other's is minus it."""
    baseline = _mean(R1, R0, sampler)
    return _mean(weight_1 * (R1 - baseline) * (1 - trainer), weight_0 * (R0 - baseline) * (-trainer), sampler)


@cache
def gradient() -> Expr:
    """Derivative of the return in arm 1's logit, from d p / d logit = p (1 - p)."""
    logit = sp.Symbol("logit", real=True)
    probability = 1 / (1 + sp.exp(-logit))
    return sp.simplify(sp.diff(_mean(R1, R0, probability), logit).subs(logit, sp.log(P / (1 - P))))


@cache
def bias_none() -> Expr:
    """Uncorrected update minus gradient, arm 1's logit: (r1 - r0) (q (1 - q) - p (1 - p))."""
    return sp.factor(sp.simplify(_update(Q, P, sp.Integer(1), sp.Integer(1)) - gradient()))


@cache
def bias_sequence_weights() -> Expr:
    """The same for weights p/q against the sampler's baseline: 0."""
    return sp.simplify(_update(Q, P, P / Q, (1 - P) / (1 - Q)) - gradient())


@cache
def lag_matrix() -> sp.Matrix:
    """M = E_mu[A score score'] in the two logits; H = E_mu[A hess log pi] is 0 by the mean baseline. (2, 2)"""
    baseline = _mean(R1, R0, MU)
    score_1, score_0 = sp.Matrix([1 - MU, -(1 - MU)]), sp.Matrix([-MU, MU])
    m = MU * (R1 - baseline) * score_1 * score_1.T + (1 - MU) * (R0 - baseline) * score_0 * score_0.T
    return m.applyfunc(sp.factor)


@cache
def loop_gain() -> Expr:
    """The one non-zero eigenvalue of -eta M: -2 eta (r1 - r0) mu (1 - mu) (1 - 2 mu).

    It feeds the lag where the better arm is already the likelier one, and damps it before.
    """
    values = (-ETA * lag_matrix()).eigenvals()
    return sp.factor(next(value for value in values if value != 0))


class Collapse(NamedTuple):
    """probability: of arm 1 at which ESS is the threshold. steps: real number of updates to get there."""

    probability: Expr
    steps: Expr


@cache
def collapse() -> Collapse:
    """Uncorrected lag of a bandit whose arm 1 is the better one, R - E[R] as advantage, from mu, never synced.

    The stale update does not depend on pi, so the log-odds grow by 2 eta (r1 - r0) mu (1 - mu) each step. ESS passes
    the threshold where (p - mu)^2 = mu (1 - mu) (1/threshold - 1): at 1/2 never if mu >= 1/2, for then p would pass 1.
    """
    solutions = sp.solve(sp.Eq(P**2 * (1 - Q) + (1 - P) ** 2 * Q, Q * (1 - Q) / THRESHOLD), P)
    above = next(
        s for s in solutions if s.subs({Q: sp.Rational(1, 5), THRESHOLD: sp.Rational(1, 2)}) > sp.Rational(1, 5)
    )
    probability = sp.simplify(above.subs(Q, MU))
    drift = sp.factor(_update(MU, P, sp.Integer(1), sp.Integer(1)))
    if drift.has(P):
        raise ArithmeticError("the stale update depends on the trainer")
    odds = sp.log(probability / (1 - probability)) - sp.log(MU / (1 - MU))
    return Collapse(probability, odds / (2 * ETA * drift))


class Expansion(NamedTuple):
    """Of a K-armed softmax: Var[log w]_k = a k^2 + b k to second order in the step size. Symbols: p_i, r_i, eta, n."""

    p: tuple[sp.Symbol, ...]
    r: tuple[sp.Symbol, ...]
    n: sp.Symbol
    a: Expr
    b: Expr


def variance_series(arms: int) -> tuple[Expr, Expr, tuple[sp.Symbol, ...], tuple[sp.Symbol, ...]]:
    """(second-order term of Var_p[log w] after the logits move by x, x' F x, p, x): the same expression twice over.

    By differentiating the variance of log(softmax(log p + s x) / p) twice at s = 0; its value and slope vanish there.
    """
    p, x = sp.symbols(f"p1:{arms + 1}", positive=True), sp.symbols(f"x1:{arms + 1}", real=True)
    s = sp.Symbol("s", real=True)
    norm = sp.log(sum(a * sp.exp(s * b) for a, b in zip(p, x, strict=True)) / sum(p))
    log_w = [s * b - norm for b in x]
    mean = sum(a * b for a, b in zip(p, log_w, strict=True))
    variance = sum(a * (b - mean) ** 2 for a, b in zip(p, log_w, strict=True))
    terms = [sp.diff(variance, s, order).subs(s, 0) / sp.factorial(order) for order in range(3)]
    last = {p[-1]: 1 - sum(p[:-1])}
    if any(sp.simplify(term.subs(last)) != 0 for term in terms[:2]):
        raise ArithmeticError("the variance has a term below second order")
    square, first = (sp.Add(*(a * b**n for a, b in zip(p, x, strict=True))) for n in (2, 1))
    form = square - first**2
    return sp.expand(terms[2].subs(last)), sp.expand(form.subs(last)), p, x


def quadratic_in_steps(k: int) -> tuple[Expr, Expr]:
    """(E[x_k' F x_k], k^2 g' F g + k tr(F Sigma) / n) for x_k = sum of k updates g + noise_j, in two dimensions.

    The noises are independent, of mean 0 and covariance Sigma / n: cross terms of two steps vanish, so that what drifts
    grows as k^2 and what diffuses as k.
    """
    g = sp.Matrix(sp.symbols("g1 g2", real=True))
    f11, f12, f22, s11, s12, s22 = sp.symbols("f11 f12 f22 s11 s12 s22", real=True)
    n = sp.Symbol("n", positive=True)
    fisher, sigma = sp.Matrix([[f11, f12], [f12, f22]]), sp.Matrix([[s11, s12], [s12, s22]])
    noise = [sp.Matrix(sp.symbols(f"z{j}_1 z{j}_2", real=True)) for j in range(k)]
    x = sp.zeros(2, 1)
    for z in noise:
        x += g + z
    polynomial = sp.Poly(sp.expand((x.T * fisher * x)[0]), *[entry for z in noise for entry in z])
    expected = sp.Integer(0)
    for powers, coefficient in polynomial.terms():
        where = [i for i, power in enumerate(powers) for _ in range(power)]
        if not where:
            expected += coefficient
        elif len(where) == 2 and where[0] // 2 == where[1] // 2:
            expected += coefficient * sigma[where[0] % 2, where[1] % 2] / n
    claimed = k**2 * (g.T * fisher * g)[0] + k * (fisher * sigma).trace() / n
    return sp.expand(expected), sp.expand(claimed)


@cache
def expansion(arms: int = 3) -> Expansion:
    """a = eta^2 g' F g and b = eta^2 tr(F Sigma) / n of a bandit, by summing over its arms; A = R - E[R]."""
    p, r = sp.symbols(f"p1:{arms + 1}", positive=True), sp.symbols(f"r1:{arms + 1}", real=True)
    n = sp.Symbol("n", positive=True)
    baseline = sum(a * b for a, b in zip(p, r, strict=True))
    scores = [sp.Matrix([int(i == a) - p[i] for i in range(arms)]) for a in range(arms)]
    fisher, first, second = sp.zeros(arms, arms), sp.zeros(arms, 1), sp.zeros(arms, arms)
    for a in range(arms):
        gain = r[a] - baseline
        fisher += p[a] * scores[a] * scores[a].T
        first += p[a] * gain * scores[a]
        second += p[a] * gain**2 * scores[a] * scores[a].T
    sigma = second - first * first.T
    return Expansion(p, r, n, ETA**2 * (first.T * fisher * first)[0], ETA**2 * (fisher * sigma).trace() / n)


class CisBound(NamedTuple):
    """weight_cap: largest weight at sampler probability q. slack: e^c - weight_cap, >= 0 as q, c >= 0."""

    weight_cap: Expr
    slack: Expr


@cache
def cis_bound() -> CisBound:
    """E_q[w^2] <= e^c for w = sigma(logit q + min(Delta, c)) / q, Delta = logit p - logit q.

    w <= p/q and w <= sigma(logit q + c)/q = e^c / (1 + q (e^c - 1)) = e^c - slack, so sum_a q w^2 <= sum_a p e^c.
    """
    odds = Q / (1 - Q) * sp.exp(CAP)
    weight_cap = sp.simplify(odds / (1 + odds) / Q)
    slack = sp.factor(sp.simplify(sp.exp(CAP) - weight_cap))
    return CisBound(weight_cap, slack)


class LevinMay(NamedTuple):
    """On the unit circle, z = e^{i w}: the gain that puts a root there where real, and the first such angle."""

    w: sp.Symbol
    tau: sp.Symbol
    gain: Expr  # real part of kappa(w)
    imaginary: Expr  # its imaginary part, which must vanish
    angle: Expr  # the smallest w > 0 at which it does
    critical: Expr  # gain at that angle


@cache
def levin_may() -> LevinMay:
    """Critical gain of z^{tau+1} - z^tau + kappa = 0 from the polynomial itself, for any lag tau.

    kappa = z^tau - z^{tau+1} = e^{i w tau} (1 - e^{i w}). Writing w = 2 v, 1 - e^{2 i v} = -2 i e^{i v} sin v, so
    kappa = 2 sin v sin((2 tau + 1) v) - 2 i sin v cos((2 tau + 1) v): real where cos((2 tau + 1) v) = 0, first at
    v = pi / (2 (2 tau + 1)), where kappa = 2 sin v. Later angles make the sine +-1 and sin v larger: the first loss.
    """
    w, tau = sp.Symbol("w", positive=True), sp.Symbol("tau", integer=True, nonnegative=True)
    real = sp.cos(w * tau) - sp.cos(w * (tau + 1))
    imaginary = sp.sin(w * tau) - sp.sin(w * (tau + 1))
    gain = 2 * sp.sin(w / 2) * sp.sin((2 * tau + 1) * w / 2)
    rest = -2 * sp.sin(w / 2) * sp.cos((2 * tau + 1) * w / 2)
    for left, right in ((real, gain), (imaginary, rest)):
        if sp.expand((left - right).rewrite(sp.exp)).simplify() != 0:
            raise ArithmeticError("the polynomial on the unit circle does not factor as claimed")
    angle = sp.pi / (2 * tau + 1)
    if rest.subs(w, angle).simplify() != 0:
        raise ArithmeticError("the gain is not real at the claimed angle")
    return LevinMay(w, tau, gain, rest, angle, sp.simplify(gain.subs(w, angle)))
