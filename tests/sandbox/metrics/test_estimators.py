"""ESS, its error, KL estimators and the decomposition: published examples, slow formulas, properties."""

import dataclasses
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from sandbox import metrics
from sandbox.batch import Batch
from sandbox.errors import BadInput
from sandbox.metrics import estimators, report
from tests.support.strategies import batches

log_weights = arrays(float, st.integers(1, 40), elements=st.floats(-30, 30))


@pytest.mark.parametrize(
    ("weights", "fraction"),
    [
        ([1, 1, 1, 97], 10000 / (4 * 9412)),  # raw; truncated at 2 it would read .893
        ([1, 1, 0, 1], 0.75),  # a weight of 0 stays in n
        ([1, 2], 0.9),
        ([0, 0, 5], 1 / 3),  # one live weight
    ],
)
def test_ess_of_known_weights(weights: list[float], fraction: float):
    log_weight = np.array([math.log(w) if w else -math.inf for w in weights])
    assert estimators.ess(log_weight) == pytest.approx(fraction, rel=1e-12)


def test_ess_in_log_space_does_not_overflow():
    assert estimators.ess(np.array([200.0, 199.0])) == pytest.approx((1 + math.exp(-1)) ** 2 / (1 + math.exp(-2)) / 2)
    assert estimators.ess(np.array([-5000.0, -5000.0])) == pytest.approx(1.0, rel=1e-12)


def test_ess_is_undefined_without_weight():
    assert math.isnan(estimators.ess(np.array([-math.inf, -math.inf])))
    assert math.isnan(estimators.ess(np.zeros(0)))


@given(log_weights, st.floats(-50, 50), st.randoms(use_true_random=False))
def test_ess_is_invariant_and_bounded(log_weight: np.ndarray, shift: float, random):
    value = estimators.ess(log_weight)
    w = [math.exp(x) for x in log_weight]
    assert value == pytest.approx(sum(w) ** 2 / sum(x * x for x in w) / len(w), rel=1e-9)
    assert 1 / len(w) - 1e-12 <= value <= 1 + 1e-12
    assert estimators.ess(log_weight + shift) == pytest.approx(value, rel=1e-9)
    shuffled = log_weight.copy()
    random.shuffle(shuffled)
    assert estimators.ess(shuffled) == pytest.approx(value, rel=1e-12)
    assert estimators.ess(torch.tensor(log_weight)).item() == pytest.approx(value, rel=1e-12)
    assert estimators.renyi2(log_weight) == pytest.approx(-math.log(value), abs=1e-9)


def test_ess_along_leading_axes():
    log_weight = np.log(np.array([[1, 2, 4], [1, 1, 7]], dtype=float))
    np.testing.assert_allclose(estimators.ess(log_weight), [49 / 21 / 3, 81 / 51 / 3])


def test_standard_error_against_a_bootstrap_over_prompts():
    """400 prompts of 3 responses sharing a common part. The bootstrap's own error is 1.6 %; 5 sigma: 8 %."""
    rng = np.random.default_rng(0)
    prompts, group = 400, np.repeat(np.arange(400), 3)
    log_weight = 0.5 * rng.normal(size=prompts)[group] + 0.2 * rng.normal(size=1200) + 0.3
    by_prompt = log_weight.reshape(prompts, 3)
    resampled = [float(estimators.ess(by_prompt[rng.integers(prompts, size=prompts)].ravel())) for _ in range(2000)]
    error = estimators.ess_standard_error(log_weight, group)
    assert error == pytest.approx(np.std(resampled), rel=0.08)
    # taken for independent, the same responses look more certain than they are
    assert estimators.ess_standard_error(log_weight, np.arange(1200)) < 0.8 * error


def test_kl_estimators_of_a_printed_example():
    """t = [.1, -.2, .05] under q: k1 .016667, k2 .008750, k3 .008391; the reverse direction's k3 would be .009157."""
    q = np.array([[-1.0, -2.0, -0.7, 0.0]])
    t = np.array([[0.1, -0.2, 0.05, 9.0]])
    batch = Batch(q + t, q, np.array([[True, True, True, False]]), np.ones((1, 1)))
    kl = estimators.kl_sampler_train(batch)
    assert kl["k1"] == pytest.approx(0.0166667, abs=1e-6)
    assert kl["k2"] == pytest.approx(0.00875, abs=1e-6)
    assert kl["k3"] == pytest.approx(0.008391, abs=1e-6)


@given(batches())
def test_the_token_error_splits_exactly(batch: Batch):
    split = estimators.decompose(batch)
    assert split.total == pytest.approx(split.discrepancy + split.lag + split.cross_term, abs=1e-12, nan_ok=True)
    tokens = list(zip(*np.nonzero(batch.mask), strict=True))
    d = [batch.logp_sync[i] - batch.logp_rollout[i] for i in tokens]
    g = [batch.logp_train[i] - batch.logp_sync[i] for i in tokens]
    if not tokens:
        assert math.isnan(split.discrepancy)
        return
    n = len(tokens)
    assert split.discrepancy == pytest.approx(sum(x * x for x in d) / n)
    assert split.lag == pytest.approx(sum(x * x for x in g) / n)
    assert split.cross_term == pytest.approx(2 * sum(x * y for x, y in zip(d, g, strict=True)) / n, abs=1e-12)
    if d and split.discrepancy + split.lag > 0:
        assert split.lag_share == pytest.approx(split.lag / (split.lag + split.discrepancy))
    for source, per_token in (("lag", g), ("discrepancy", d)):
        total = float(estimators.sequence_log_weight(batch, source).sum())
        assert total == pytest.approx(sum(per_token), abs=1e-9)


def test_without_the_trainer_at_the_samplers_weights_nothing_is_split():
    batch = Batch(np.zeros((1, 1)), np.zeros((1, 1)), np.ones((1, 1), bool), np.ones((1, 1)))
    with pytest.raises(BadInput, match="no logp_sync"):
        estimators.decompose(batch)
    assert math.isnan(estimators.decompose(dataclasses.replace(batch, logp_sync=np.zeros((1, 1)))).lag_share)


def test_a_row_masked_throughout_is_no_response():
    """Three responses of log weights ln 1, ln 2, ln 4: ESS 49/63, with or without empty rows between them."""
    t = np.log([[1.0, 1.0], [9.0, 9.0], [2.0, 1.0], [9.0, 9.0], [2.0, 2.0]])
    mask = np.array([[True, True], [False, False], [True, True], [False, False], [True, True]])
    batch = Batch(np.full((5, 2), -2.0) + t, np.full((5, 2), -2.0), mask, np.ones((5, 1)))
    log_weight = estimators.sequence_log_weight(batch)
    np.testing.assert_allclose(np.exp(log_weight), [1, 2, 4])
    assert float(estimators.ess(log_weight)) == pytest.approx(49 / 21 / 3)
    told = report(batch)
    assert (told.n_responses, told.ess["sequence"].n) == (3, 3)
    assert told.ess["sequence"].raw == pytest.approx(49 / 21 / 3)
    nothing = dataclasses.replace(batch, mask=mask & False)
    assert estimators.sequence_log_weight(nothing).shape == (0,)
    assert all(math.isnan(x) for x in estimators.kl_sampler_train(nothing).values())


def test_unknown_source():
    batch = Batch(np.zeros((1, 1)), np.zeros((1, 1)), np.ones((1, 1), bool), np.ones((1, 1)))
    with pytest.raises(BadInput, match="source is 'old'"):
        estimators.sequence_log_weight(batch, "old")


# Pareto k, bootstrap, top share.


@pytest.mark.parametrize("k", [0.1, 0.3, 0.5, 0.8, 1.2])
def test_pareto_k_of_exact_pareto_tails(k: float):
    """w = u^-k has shape k exactly. 20 samples of 4,000: the mean is within .06 (arviz shrinks towards 1/2)."""
    rng = np.random.default_rng(0)
    found = [estimators.pareto_k(-k * np.log(rng.random(4000))) for _ in range(20)]
    assert np.mean(found) == pytest.approx(k, abs=0.06)
    # the wrong sign would say about -1 and "healthy"
    assert estimators.pareto_k(k * np.log(rng.random(4000))) < 0


def test_pareto_k_is_arvizs_and_needs_only_the_largest():
    from arviz_stats.base.array import array_stats

    log_weight = 0.7 * np.random.default_rng(1).standard_t(4, size=3000) + 2.0
    expected = float(array_stats.psislw(-log_weight)[1])
    assert estimators.pareto_k(log_weight) == pytest.approx(expected, rel=1e-12)
    largest = np.sort(log_weight)[-5 * estimators.pareto_tail(3000) :]
    assert estimators.pareto_k(largest, n=3000) == pytest.approx(expected, rel=1e-12)
    assert estimators.pareto_k(log_weight + 500.0) == pytest.approx(expected, rel=1e-9)


def test_pareto_k_by_rule():
    rng = np.random.default_rng(0)
    for equal in (0.0, 3.0, -3.0):
        assert estimators.pareto_k(np.full(100, equal)) == -math.inf  # equal weights: no tail
    small = rng.normal(size=200)
    assert estimators.pareto_k(small - 50.0) == pytest.approx(estimators.pareto_k(small), rel=1e-9)
    assert math.isnan(estimators.pareto_k(rng.normal(size=24)))  # too few
    assert math.isfinite(estimators.pareto_k(rng.normal(size=25)))
    assert math.isnan(estimators.pareto_k(np.array([math.nan, *rng.normal(size=99)])))
    assert math.isnan(estimators.pareto_k(np.array([math.inf, *rng.normal(size=99)])))
    zeros = np.r_[np.full(60, -math.inf), rng.normal(size=40)]
    assert math.isfinite(estimators.pareto_k(zeros))  # 60 % weights of 0 stay in n
    assert math.isnan(estimators.pareto_k(np.full(100, -math.inf)))
    assert estimators.pareto_k_limit(100) == 0.5
    assert estimators.pareto_k_limit(10**6) == 0.7


def test_bootstrap_interval_covers_and_respects_prompts():
    """90 % intervals of n = 400 light-tailed weights cover the population ESS in at least 78 % of 200 samples."""
    rng = np.random.default_rng(0)
    true = math.exp(-(0.4**2))
    hits = 0
    for _ in range(200):
        low, high = estimators.ess_interval(0.4 * rng.normal(size=400), estimators.resamples(rng, 400, replicates=200))
        hits += low <= true <= high
    assert 156 <= hits <= 196
    spread, times = 2.0 * rng.normal(size=50), estimators.resamples(rng, 50, replicates=100)
    near = estimators.ess_interval(spread, times)
    for far in (700.0, -700.0):  # squares of such weights overflow, or are 0
        assert estimators.ess_interval(spread + far, times) == pytest.approx(near, rel=1e-9)
    tiny, none = (
        np.r_[spread[1:], x] for x in (-800.0, -math.inf)
    )  # e^800 overflows: the largest is the one to subtract
    assert estimators.ess_interval(tiny, times) == pytest.approx(estimators.ess_interval(none, times), rel=1e-12)
    group = np.repeat(np.arange(80), 5)
    log_weight = 0.5 * rng.normal(size=80)[group]  # one number a prompt: as if n were 80
    widths = [
        high - low
        for low, high in (
            estimators.ess_interval(log_weight, estimators.resamples(rng, 400, by, 2000)) for by in (group, None)
        )
    ]
    assert widths[0] == pytest.approx(math.sqrt(5) * widths[1], rel=0.15)
    counts = estimators.resamples(rng, 400, group, 10)
    assert (counts.sum(axis=1) == 400).all()
    assert (counts.reshape(10, 80, 5) == counts.reshape(10, 80, 5)[..., :1]).all()
    assert all(math.isnan(x) for x in estimators.ess_interval(np.full(3, -math.inf), np.ones((2, 3))))


def test_top_share_and_chi2():
    assert estimators.top_share(np.log(np.r_[np.ones(99), 101.0])) == pytest.approx(101 / 200)
    assert estimators.top_share(np.log([1.0, 3.0])) == 0.75
    for far in (800.0, -800.0):  # e^800 overflows, e^-800 is 0
        assert estimators.top_share(far + np.log([1.0, 3.0])) == pytest.approx(0.75, rel=1e-12)
    assert math.isnan(estimators.top_share(np.zeros(0)))
    w = np.array([1.0, 2.0, 6.0])
    assert estimators.chi2(np.log(w)) == pytest.approx((w**2).mean() / w.mean() ** 2 - 1)


def test_influence_is_the_derivative_by_how_often_a_response_counts():
    """u_i = n d log ESS / d c_i at c = 1, with response i counted c_i times."""
    log_weight = np.log(np.array([0.2, 1.0, 1.5, 9.0, 0.01]))
    w, h = np.exp(log_weight), 1e-6

    def log_ess(count: np.ndarray) -> float:
        return math.log((count @ w) ** 2 / (count @ w**2) / count.sum())

    steps = h * np.eye(5)
    slope = [(log_ess(1 + step) - log_ess(1 - step)) / (2 * h) for step in steps]
    value, influence = estimators.ess_and_influence(log_weight)
    assert value == pytest.approx(math.exp(log_ess(np.ones(5))))
    np.testing.assert_allclose(influence, 5 * np.array(slope), atol=1e-7)


def test_bootstrap_of_sums_is_the_ess_of_the_tokens_of_the_drawn_responses():
    tokens = [np.array([0.5, 2.0]), np.array([1.0]), np.array([3.0, 0.1, 0.4])]
    times = np.array([[2.0, 0.0, 1.0], [0.0, 3.0, 0.0], [1.0, 1.0, 1.0], [0.0, 1.0, 2.0]])
    values = []
    for row in times:
        drawn = np.concatenate([w for w, k in zip(tokens, row, strict=True) for _ in range(int(k))])
        values.append(drawn.sum() ** 2 / (drawn**2).sum() / len(drawn))
    sums = [np.array([f(w) for w in tokens]) for f in (len, np.sum, lambda w: np.sum(w**2))]
    for level in (0.5, 0.9):
        expected = np.quantile(values, [(1 - level) / 2, (1 + level) / 2])
        assert estimators.bootstrap_ess(times, *sums, level) == pytest.approx(expected)
    assert estimators.bootstrap_ess(np.zeros((2, 3)), *sums) == pytest.approx((math.nan, math.nan), nan_ok=True)


def test_results_have_the_published_types():
    pi, mu, q = (np.log([row]) for row in ([0.5, 0.25], [0.45, 0.35], [0.4, 0.3]))
    batch = Batch(pi, q, np.ones((1, 2), bool), np.ones((1, 1)), logp_sync=mu)
    assert isinstance(estimators.decompose(batch), metrics.Decomposition)
    told = metrics.report(batch)
    assert isinstance(told, metrics.Report)
    assert isinstance(metrics.summarise(batch), metrics.Summary)
    t = np.log([0.5 / 0.4, 0.25 / 0.3])
    assert estimators.decompose(batch).total == pytest.approx(np.mean(t**2))
    assert told.ess["token"].raw == pytest.approx(np.exp(t).sum() ** 2 / np.exp(2 * t).sum() / 2)
