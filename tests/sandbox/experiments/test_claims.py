"""The claims: every one runs, criteria stand before measurements, exact numbers against independent computations."""

import ast
import json
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure
from numpy.testing import assert_allclose

from realmodel import cli
from sandbox.corrections import CIS, CORRECTIONS
from sandbox.errors import BadInput
from sandbox.experiments import baseline, claims, neighbours, remedies, sources, verdicts
from sandbox.tabular import exact, simulate
from sandbox.tabular.policy import policies
from sandbox.tabular.problems import PRESETS, sparse_tree

IDS = [f"C{i}" for i in range(1, 12)] + [f"N{i}" for i in range(1, 8)]


@pytest.fixture(scope="module")
def rows() -> dict[str, claims.Row]:
    return {row.id: row for row in claims.run(claims.CLAIMS, fast=True)}


def test_every_claim_is_answered_in_full(rows):
    assert list(rows) == IDS
    for row in rows.values():
        assert row.verdict in ("holds", "fails", "by construction", "not tested")
        assert len(row.statement) > 20
        assert len(row.criterion) > 10
        assert len(row.reason) > 10
        if row.verdict != "not tested":
            assert row.n > 1
            assert not math.isnan(row.value)
            low, high = row.interval
            assert math.isnan(low) == math.isnan(high)
            assert math.isnan(low) or low <= row.value <= high
    shown = claims.shown(list(rows.values()))
    assert [row["claim"] for row in shown] == IDS


def test_what_holds_by_construction_is_exactly_zero(rows):
    found = {name: row.value for name, row in rows.items() if row.verdict == "by construction"}
    assert found == {"C1": 0.0, "C2": 0.0, "C10": 0.0, "N4": 0.0}
    assert rows["C2"].measured["rms g after a sync"] == 0
    assert rows["C2"].measured["rms g before a sync"] > 0.05


def test_criteria_are_written_down_and_not_computed():
    """In the source of claims.py, statement, criterion and threshold of every claim are literals."""
    calls = [
        node
        for node in ast.walk(ast.parse(Path(claims.__file__).read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Claim"
    ]
    assert len(calls) == len(claims.CLAIMS) == len(IDS)
    for call in calls:
        assert all(isinstance(argument, ast.Constant) for argument in call.args[:3])
        assert isinstance(call.args[3], ast.Constant) or ast.unparse(call.args[3]) == "math.nan"


def test_a_verdict_follows_from_value_and_threshold():
    """The same measurement against another threshold is another verdict."""
    assert sources.lag_closes_a_loop(0.25, True).verdict == "holds"
    assert sources.lag_closes_a_loop(0.01, True).verdict == "fails"
    assert neighbours.rate_and_sources(0.1, True).verdict == "holds"
    assert neighbours.rate_and_sources(1e-6, True).verdict == "fails"


@pytest.mark.parametrize("claim", [claim for claim in claims.CLAIMS if claim.figure], ids=lambda claim: claim.id)
def test_figures_are_drawn(rows, claim):
    ax = Figure().subplots()
    assert claim.figure(ax, rows[claim.id].table) is ax
    assert ax.get_xlabel()
    assert ax.get_ylabel()
    assert len(ax.lines) > 0


def test_lost_state_by_hand(rows):
    """C4 on negative_prefixes. Two of three first tokens lead to the lost state, where all 31 tokens have advantage
    0 - 1/3: the exact gradient there is 0, the uncorrected one 31 (2/3)(-1/3)(1/3 - pi), over sd(R) = sqrt(2)/3."""
    measured = rows["C4"].measured
    x = start = np.array([0.1, 0.0, -0.1])
    for _ in range(measured["negative_prefixes: updates"]):
        pi = np.exp(x) / np.exp(x).sum()
        x = x + 0.01 * 31 * (2 / 9) * (pi - 1 / 3) / (math.sqrt(2) / 3 + 1e-6)
    excess = np.linalg.norm(x) / np.linalg.norm(start) - 1
    assert_allclose(measured["negative_prefixes: excess lag over the exactly corrected"], excess, rtol=1e-9)
    assert excess > 1


def test_half_of_the_ess_by_a_plain_loop(rows):
    """N7 at T = 16: scale of the offset by bisection on a loop over time and states, KL by another."""
    case = PRESETS["machine"]()
    transition = case.problem.transition
    mu = np.exp(case.sampler_logits)
    mu /= mu.sum(axis=1, keepdims=True)
    offset = np.random.default_rng(0).normal(size=mu.shape)

    def second_moment_and_kl(scale: float) -> tuple[float, float]:
        q = mu * np.exp(scale * offset)
        q /= q.sum(axis=1, keepdims=True)
        moment, kl = np.ones(len(mu)), np.zeros(len(mu))
        for _ in range(16):
            moment = (mu**2 / q * moment[transition]).sum(axis=1)
            kl = (q * (np.log(q / mu) + kl[transition])).sum(axis=1)
        return float(moment[0]), float(kl[0])

    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if second_moment_and_kl(middle)[0] < 2 else (low, middle)
    assert_allclose(rows["N7"].measured["T x KL at ESS = 1/2, T = 16"], second_moment_and_kl(low)[1], rtol=1e-9)


def test_small_exact_numbers(rows):
    n3 = rows["N3"].measured
    assert_allclose(n3["critical tau x eta kappa, tau = 1"], 1, rtol=1e-12)
    assert_allclose(n3["critical tau x eta kappa, tau = 64"], 64 * 2 * math.sin(math.pi / 258), rtol=1e-12)
    assert_allclose(n3["exponent of ess_step in eta, noise alone"], -2, rtol=1e-9)
    assert_allclose(n3["exponent of ess_step in eta, drift alone"], -1, rtol=1e-9)
    assert rows["N4"].measured == {"lag share in the world of lag": 1, "lag share in the world of discrepancy": 0}
    parts = ("leading", "within_token", "prefix", "downstream")
    assert all(rows["C3"].measured[f"{part} over total at T = 64"] > 0 for part in parts)
    assert rows["C8"].measured["largest E_q[w^2] / e^cap"] <= 1


def test_raised_weights_by_hand():
    """sigma(logit q + clip(Delta, -cap, cap)) / q at every token."""
    rng = np.random.default_rng(5)
    now = policies(rng.normal(size=(6, 4)) + 0.3, rng.normal(size=(6, 4)) * 2)
    weight = exact.token_weights(now, CIS(0.4, -0.4)).weight
    pi, q = np.exp(now.train), np.exp(now.rollout)
    logit = np.log(q / (1 - q))
    held = logit + np.clip(np.log(pi / (1 - pi)) - logit, -0.4, 0.4)
    assert_allclose(weight, 1 / (1 + np.exp(-held)) / q, rtol=1e-12)
    assert (weight > np.exp(now.train - now.rollout) + 1e-3).any()


def test_ratio_leaves_a_run_out_of_its_own_pairs():
    between = np.array([[0.0, 1.0, 3.0], [1.0, 0.0, 2.0], [3.0, 2.0, 0.0]])
    value, low, high = remedies._ratio(np.full((2, 3), 6.0), between)
    assert value == 3
    assert low <= 3 <= high
    assert (low, high) == (2, 6)  # pairs drawn alone: 6 over 3, 6 over 1


def test_bootstrap_intervals():
    rng = np.random.default_rng(0)
    sample = rng.normal(1, 2, 400)
    value, low, high = verdicts.compared(lambda x: x.mean(axis=-1), sample)
    assert value == sample.mean()
    assert_allclose([value - low, high - value], 1.96 * sample.std() / 20, rtol=0.1)
    paired = verdicts.compared(verdicts.difference, sample + 1, sample, paired=True)
    assert_allclose(paired, 1, rtol=1e-12)
    unpaired = verdicts.compared(verdicts.difference, sample + 1, sample)
    assert unpaired[2] - unpaired[1] > 0.3
    assert verdicts.median(np.array([1.0, 2.0, math.inf, math.inf])) == 2
    assert_allclose(verdicts.share_lost(np.full(3, 0.4), np.full(5, 0.6), 0.2), 0.5)


def test_step_rules():
    update, before = np.array([[[3.0, 4.0]]]), np.array([[[1.0, 0.0]]])
    assert_allclose(neighbours.projected(update, before, np.ones(1)), [[[0, 4]]])
    assert_allclose(neighbours.projected(update, -before, np.ones(1)), update)
    assert_allclose(neighbours.projected(update, 0 * before, np.ones(1)), update)
    assert_allclose(neighbours.times_ess(update, before, np.array([0.5])), update / 2)


def test_following_a_rule_that_changes_nothing_is_the_simulator():
    cfg = replace(verdicts.setting("machine").cfg, steps=10)
    plain, followed = verdicts.train("machine", cfg, 2), neighbours.follow("machine", cfg, 2)
    assert_allclose(followed.final, plain.returns[:, -1], rtol=1e-9)
    assert followed.cosine.shape == (9, 2)


def test_unknown_claims_are_refused_in_one_line(mismatch):
    with pytest.raises(BadInput, match="unknown claim 'C99', known: C1, "):
        claims.chosen(["C1", "C99"])
    status, out, err = mismatch("claims", "C99")
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("mismatch: unknown claim 'C99'")


def test_json_and_folder(mismatch, tmp_path):
    status, out, _ = mismatch("claims", "N4", "C2", "--fast", "--json", "--out", "kept")
    assert status == 0
    answer = json.loads(out)
    assert [claim["id"] for claim in answer["claims"]] == ["C2", "N4"]
    assert answer["claims"][0]["value"] == 0
    assert answer["claims"][0]["interval"] == [None, None]
    assert json.loads((tmp_path / "kept" / "claims.json").read_text()) == answer
    page = (tmp_path / "kept" / "report.html").read_text()
    assert page.count("<svg") == 1
    assert "Criterion, written before the run" in page
    assert (tmp_path / "kept" / "C2.parquet").exists()
    assert mismatch("claims", "C1", "--out", "kept")[0] == 2


def test_the_table_for_people_and_no_torch():
    code = "import sys; from realmodel import cli; cli.main(); assert not {'torch', 'vllm'} & set(sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code, "claims", "C1"], capture_output=True, text=True, cwd=Path(cli.__file__).parents[1]
    )
    assert done.returncode == 0, done.stderr
    assert "by construction" in done.stdout


def test_spread_by_a_loop_over_responses_and_the_optimal_baseline_is_the_least():
    problem = sparse_tree(np.random.default_rng(2), depth=2, vocabulary=3, top=0.4)
    rng = np.random.default_rng(3)
    now = policies(rng.normal(0.3, 1, problem.shape), rng.normal(0.3, 1, problem.shape))
    found = baseline.spread(problem, now)

    def variance(baseline: float) -> float:
        second, mean = 0.0, np.zeros(problem.shape)
        for a in range(3):
            for b in range(3):
                path, score = [(0, a), (1 + a, b)], np.zeros(problem.shape)
                for s, token in path:
                    score[s] -= np.exp(now.train[s])
                    score[s, token] += 1
                q = math.exp(sum(now.rollout[pair] for pair in path))
                w = math.exp(sum(now.train[pair] for pair in path)) / q
                estimate = w * (sum(problem.reward[pair] for pair in path) - baseline) * score
                second, mean = second + q * (estimate**2).sum(), mean + q * estimate
        return second - (mean**2).sum()

    assert_allclose(found.plain, variance(found.baseline), rtol=1e-12)
    assert_allclose(found.least, variance(found.optimal), rtol=1e-12)
    assert found.least < min(variance(found.optimal - 0.01), variance(found.optimal + 0.01))


def test_training_with_sequence_weights_is_the_simulator_but_for_its_baseline():
    problem = sparse_tree(np.random.default_rng(2), depth=2, vocabulary=3, top=0.4)
    cfg = simulate.SimConfig(step_size=2.0, batch_size=8, steps=5, advantage="centred", seed=4)
    table = simulate.run(
        problem, np.zeros(problem.shape), replace(cfg, correction=CORRECTIONS["seq_is"]), range(2)
    ).table
    done, _ = baseline.train_weighted(problem, cfg, 2, "mean")
    assert_allclose(done.returns[:, 1:].ravel(), table["return"], rtol=1e-9)
    assert_allclose(done.ess.ravel(), table["batch_ess"], rtol=1e-9)
    assert (done.ess[:, -1] < 0.99).all()

    # the second update with the optimal baseline, response by response
    first, two = (baseline.train_weighted(problem, replace(cfg, steps=k), 1, "batch") for k in (1, 2))
    rng = simulate.generators(4, [0])[0]
    rng.normal(size=problem.shape)  # of the discrepancy, 0 here
    x, start, norms = np.zeros(problem.shape), np.full(problem.shape, 1 / 3), []
    for _ in range(2):
        p = np.exp(x) / np.exp(x).sum(axis=1, keepdims=True)
        drawn = []
        for u in rng.random((8, 2)):
            a = int(3 * u[0])
            path, score = [(0, a), (1 + a, int(3 * u[1]))], np.zeros(problem.shape)
            for s, token in path:
                score[s] -= p[s]
                score[s, token] += 1
            weight = math.prod(p[pair] / start[pair] for pair in path)
            drawn.append((weight, problem.reward[path[1]], score))
        heavy = [(w**2 * (score**2).sum(), reward) for w, reward, score in drawn]
        b = sum(h * reward for h, reward in heavy) / sum(h for h, _ in heavy)
        update = sum(w * (reward - b) * score for w, reward, score in drawn) / 8
        norms.append(np.linalg.norm(update))
        x = x + 2.0 * update
    assert_allclose(two[1][0], norms, rtol=1e-9)
    assert first[0].returns[0, 1] == two[0].returns[0, 1]


def test_an_alarm_is_dated_by_its_first_update():
    assert baseline.alarm(np.array([[False, True, True], [False, False, False]])).tolist() == [2, math.inf]
