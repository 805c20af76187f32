"""`report` against slow loops over tokens, numpy against torch, chunks, grouping, the edges of a batch."""

import dataclasses
import math

import numpy as np
import pytest
import scipy.stats
import torch
from hypothesis import given, settings

from sandbox.batch import Batch
from sandbox.corrections import PRESETS
from sandbox.metrics import estimators, report, summary
from tests.sandbox.corrections.test_field_reports import assert_close, of_log_ratios
from tests.sandbox.corrections.test_rules import as_torch
from tests.support.strategies import batches


def tokens_of(batch: Batch) -> list[list[tuple[float, float, float]]]:
    """(pi, mu, q) of the counted tokens of each response that has any."""
    rows = []
    for b in range(len(batch.mask)):
        logs = (batch.logp_train, batch.logp_sync, batch.logp_rollout)
        row = [tuple(math.exp(x[b, t]) for x in logs) for t in np.flatnonzero(batch.mask[b])]
        rows += [row] if row else []
    return rows


@given(batch=batches())
@settings(max_examples=100)
def test_report_against_loops(batch: Batch):
    corrected = PRESETS["icepop"](batch)
    told = report(batch, corrected)
    rows = tokens_of(batch)
    flat = [token for row in rows for token in row]
    n = len(flat)
    assert (told.n_responses, told.n_tokens) == (len(rows), n)
    if not n:
        assert told.alarms == ("the mask counts no token",)
        assert math.isnan(told.ess["sequence"].raw)
        return

    def mean(values) -> float:
        values = list(values)
        return sum(values) / len(values)

    def ess(w) -> float:
        return sum(w) ** 2 / sum(x * x for x in w) / len(w)

    ratio = {"sequence": lambda p, m, q: p / q, "sequence_lag": lambda p, m, q: p / m}
    ratio["sequence_discrepancy"] = lambda p, m, q: m / q
    for name, of in ratio.items():
        products = [math.prod(of(*token) for token in row) for row in rows]
        assert told.ess[name].raw == pytest.approx(ess(products), rel=1e-9)
        assert told.ess[name].renyi2 == pytest.approx(-math.log(ess(products)), abs=1e-9)
        assert told.ess[name].chi2 == pytest.approx(1 / ess(products) - 1, abs=1e-9)
    rho = [p / q for p, _, q in flat]
    assert told.ess["token"].raw == pytest.approx(ess(rho), rel=1e-9)
    kl = {"k1": [-math.log(r) for r in rho], "k2": [math.log(r) ** 2 / 2 for r in rho]}
    kl["k3"] = [r - 1 - math.log(r) for r in rho]
    for name, values in kl.items():
        assert told.kl_sampler_train[name] == pytest.approx(mean(values), abs=1e-12)
    by_response = [mean(math.log(q / p) for p, _, q in row) for row in rows]
    assert told.kl_sampler_train_by_response["k1"] == pytest.approx(mean(by_response), abs=1e-12)
    assert told.decomposition is not None
    assert told.decomposition.cross_term == pytest.approx(
        mean(2 * math.log(m / q) * math.log(p / m) for p, m, q in flat), abs=1e-12
    )
    expected = dataclasses.astuple(estimators.decompose(batch))
    assert dataclasses.astuple(told.decomposition) == pytest.approx(expected, abs=1e-12)
    perplexity = {
        "train": mean(math.exp(-mean(math.log(p) for p, _, _ in row)) for row in rows),
        "rollout": mean(math.exp(-mean(math.log(q) for _, _, q in row)) for row in rows),
        "ratio": mean(math.exp(x) for x in by_response),
    }
    assert told.perplexity == pytest.approx(perplexity)
    kept = [r if 0.5 <= r <= 5 else 0.0 for r in rho]
    assert told.applied is not None
    assert told.applied.rejected_fraction == pytest.approx(mean(float(k == 0) for k in kept), abs=1e-12)
    if any(kept):
        assert told.applied.ess == pytest.approx(ess(kept), rel=1e-9)
        assert told.applied.mean == pytest.approx(sum(kept) / sum(k > 0 for k in kept))
        assert told.applied.largest == pytest.approx(max(kept))
    t = np.log(rho)
    if np.ptp(t) > 1e-3:
        assert told.tails.kurtosis == pytest.approx(scipy.stats.kurtosis(t), rel=1e-5, abs=1e-5)
    edges = [0.0, *summary.PROBABILITY_EDGES, 1.1]
    for i in range(len(edges) - 1):
        inside = [math.log(p / q) for p, _, q in flat if edges[i] <= q < edges[i + 1]]
        assert told.by_probability.n[i] == len(inside)
        if inside:
            assert told.by_probability.mean[i] == pytest.approx(mean(inside), abs=1e-9)
            assert told.by_probability.mean_square[i] == pytest.approx(mean(x * x for x in inside), abs=1e-9)
    edges = [*told.by_position.edges, math.inf]
    for i in range(len(edges) - 1):
        inside = [
            math.log(row[t][0] / row[t][2]) for row in rows for t in range(len(row)) if edges[i] <= t < edges[i + 1]
        ]
        assert told.by_position.n[i] == len(inside)
        if inside:
            assert told.by_position.mean[i] == pytest.approx(mean(inside), abs=1e-9)


@given(batch=batches())
@settings(max_examples=60)
def test_numpy_equals_torch(batch: Batch):
    tensors = as_torch(batch, gradient=True)
    ours = report(batch, PRESETS["seq_tis"](batch))
    theirs = report(tensors, PRESETS["seq_tis"](tensors))
    assert_close(dataclasses.asdict(theirs), dataclasses.asdict(ours))


def big(rows: int = 400, width: int = 500, dtype=np.float64) -> Batch:
    """Enough tokens for the search of the largest weights to start from a threshold."""
    rng = np.random.default_rng(0)
    q = -rng.exponential(size=(rows, width))
    sync = q + 0.05 * rng.standard_t(3, size=q.shape)
    mask = np.arange(width) < rng.integers(width // 2, width + 1, size=(rows, 1))
    arrays = (sync + 0.1 * rng.normal(size=q.shape), q, sync)
    p, q, sync = (np.where(mask, x, np.nan).astype(dtype) for x in arrays)
    return Batch(p, q, mask, np.ones((rows, 1)), sync)


def test_large_batches_in_chunks_find_the_same_tail():
    batch = big()
    t = (batch.logp_train - batch.logp_rollout)[batch.mask]
    assert len(t) > 2**17
    told = report(batch)
    assert told.ess["token"].raw == pytest.approx(estimators.ess(t), rel=1e-12)
    assert told.ess["token"].pareto_k == pytest.approx(estimators.pareto_k(t), rel=1e-12)
    assert told.tails.top_share_token == pytest.approx(estimators.top_share(t), rel=1e-12)
    assert told.ess["sequence"].pareto_k == pytest.approx(
        estimators.pareto_k(estimators.sequence_log_weight(batch)), rel=1e-12
    )
    whole = report(summary.summarise(batch, tokens=10**9))
    assert_close(dataclasses.asdict(whole), dataclasses.asdict(told))


def test_a_misjudged_threshold_starts_the_search_again():
    """Only the columns that the threshold is guessed from hold large weights: too few tokens exceed the guess."""
    rng = np.random.default_rng(0)
    q = np.full((300, 640), -5.0)
    t = 0.1 * rng.normal(size=q.shape)
    t[:, ::64] += 3.0
    batch = Batch(q + t, q, q < 0, np.ones((300, 1)))
    told = report(batch)
    assert told.tails.top_share_token == pytest.approx(estimators.top_share(t.ravel()), rel=1e-12)
    assert told.ess["token"].pareto_k == pytest.approx(estimators.pareto_k(t.ravel()), rel=1e-9)


def test_float32_sums_stay_safe():
    """170,000 float32 tokens against float64: every number to 1e-4 relative, decomposition to 1e-5."""
    exact, single = big(), big(dtype=np.float32)
    tensors = Batch(*(torch.tensor(x) for x in (single.logp_train, single.logp_rollout, single.mask)),
                    torch.ones(len(single.mask), 1), torch.tensor(single.logp_sync))  # fmt: skip
    a, b = (report(x) for x in (tensors, exact))
    for unit, ess in b.ess.items():
        assert a.ess[unit].raw == pytest.approx(ess.raw, rel=1e-4)
    assert dataclasses.astuple(a.decomposition) == pytest.approx(dataclasses.astuple(b.decomposition), rel=1e-5)
    assert a.kl_sampler_train["k3"] == pytest.approx(b.kl_sampler_train["k3"], rel=1e-5)
    assert a.perplexity == pytest.approx(b.perplexity, rel=1e-5)
    assert a.tails.kurtosis == pytest.approx(b.tails.kurtosis, rel=1e-4)


def test_k3_keeps_its_digits_where_the_mismatch_is_tiny():
    t = 1e-8 * np.array([1.0, -2.0, 3.0])
    assert report(of_log_ratios(t, q=0.0)).kl_sampler_train["k3"] == pytest.approx((t**2).mean() / 2, rel=1e-6)


def test_prompts_are_the_unit_of_the_interval():
    rng = np.random.default_rng(0)
    group = np.repeat(np.arange(50), 4)
    batch = of_log_ratios(0.5 * rng.normal(size=50)[group][:, None])
    alone, grouped = (report(batch, group=g).ess["sequence"] for g in (None, group))
    assert alone.raw == grouped.raw
    assert grouped.high - grouped.low > 1.5 * (alone.high - alone.low)


@pytest.mark.parametrize("shape", [(0, 3), (3, 0), (2, 2)])
def test_batches_with_nothing_in_them(shape: tuple[int, int]):
    batch = Batch(np.zeros(shape), np.zeros(shape), np.zeros(shape, bool), np.ones((shape[0], 1)))
    for given_batch in (batch, as_torch(batch)):
        told = report(given_batch, PRESETS["tis"](given_batch))
        assert (told.n_responses, told.n_tokens) == (0, 0)
        assert told.alarms == ("the mask counts no token",)


def test_a_token_the_trainer_rules_out_is_an_alarm_and_stays_in_n():
    batch = of_log_ratios([[0.0], [0.0], [-math.inf], [0.0]])
    told = report(batch)
    assert told.ess["sequence"].raw == pytest.approx(0.75)
    assert told.ess["token"].raw == pytest.approx(0.75)
    assert "the trainer gives probability 0 to a drawn token" in told.alarms
    assert told.kl_sampler_train["k1"] == math.inf


@pytest.mark.filterwarnings("ignore::UserWarning:torch")  # a hundred lines on cached functions of array-api-compat
def test_the_pass_over_the_tokens_compiles_as_one_graph():
    batch = as_torch(big(8, 40))
    corrected = PRESETS["tis"](batch)
    compiled = torch.compile(summary.token_sums, fullgraph=True, backend="aot_eager", dynamic=False)
    fast = report(summary.summarise(batch, corrected, compiled))
    assert_close(dataclasses.asdict(fast), dataclasses.asdict(report(batch, corrected)))
