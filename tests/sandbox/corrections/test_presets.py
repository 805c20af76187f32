"""Presets of public frameworks against their own formulas on three fixed batches, and exact bias by enumeration."""

import dataclasses
import json
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings

from sandbox.batch import Batch
from sandbox.corrections import Compose, Correction, FiniteOnly, PPOClip, Truncate, presets
from sandbox.output import config
from sandbox.tabular import exact
from sandbox.tabular.policy import policies
from sandbox.tabular.problems import Problem
from tests.support import reference, reference_frameworks, strategies

Responses = list[list[reference_frameworks.Token]]


def fixed(seed: int) -> tuple[Responses, list[float]]:
    """Four to six responses of unequal length: near (0; the last next to equal), far (1), trainer << sampler (2)."""
    rng = np.random.default_rng(seed)
    near, skew = [(0.02, 0.0), (0.6, 0.2), (1.2, -0.6)][seed]
    responses = []
    for i, length in enumerate([(3, 5, 2, 4), (4, 1, 6, 3, 2, 5), (2, 7, 3, 4)][seed]):
        q = -rng.exponential(1.0, length) - 0.05
        near, shift = (1e-4, 0.0) if (seed, i) == (0, 3) else (near, 0.1)
        old = np.minimum(q + near * rng.normal(size=length) + skew, -1e-3)
        new = np.minimum(old + 0.8 * near * rng.normal(size=length) + shift, -1e-3)
        responses.append([tuple(map(float, row)) for row in zip(new, old, q, strict=True)])
    return responses, [float(a) for a in rng.normal(0.3, 1.0, len(responses))]


def as_batch(responses: Responses, advantages: list[float]) -> Batch:
    """Padded on the right with nan."""
    width = max(map(len, responses)) + 1
    table = np.full((3, len(responses), width), np.nan)
    for b, tokens in enumerate(responses):
        table[:, b, : len(tokens)] = np.array(tokens).T
    return Batch(table[0], table[2], ~np.isnan(table[2]), np.array(advantages)[:, None], logp_old=table[1])


def padded(rows: list[list], like: np.ndarray) -> np.ndarray:
    out = np.zeros(like.shape)
    for b, row in enumerate(rows):
        out[b, : len(row)] = row
    return out


def weights_alone(correction: Correction) -> Correction:
    """A preset without the surrogate that it multiplies."""
    if isinstance(correction, FiniteOnly):
        return FiniteOnly(weights_alone(correction.rule))
    if isinstance(correction, Compose):
        return Compose(tuple(rule for rule in correction.rules if not isinstance(rule, PPOClip)))
    return correction


def golden(name: str, responses: Responses, advantages: list[float]) -> reference_frameworks.Result:
    framework, _, rule = name.partition(".")
    result = getattr(reference_frameworks, framework)(rule, responses, advantages)
    return result[0] if framework == "areal" else result


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", presets.FRAMEWORKS)
def test_weights_and_masks_of_frameworks(name: str, seed: int):
    responses, advantages = fixed(seed)
    batch = as_batch(responses, advantages)
    corrected = presets.FRAMEWORKS[name](batch)
    expected = golden(name, responses, advantages)
    np.testing.assert_array_equal(corrected.keep, padded(expected.mask, batch.mask) > 0)
    update = np.where(corrected.keep, corrected.weight * np.ones(batch.mask.shape), 0.0)
    np.testing.assert_allclose(update, padded(expected.update, batch.mask), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", presets.FRAMEWORKS)
def test_the_fixed_batches_reach_both_sides_of_every_rule(name: str):
    """Some token of the three batches is kept untouched and some other is cut: a golden nobody can pass by chance."""
    cut = kept = 0
    for seed in range(3):
        corrected = presets.FRAMEWORKS[name](as_batch(*fixed(seed)))
        plain = as_batch(*fixed(seed)).mask
        free = corrected.keep & (corrected.weight != 0) & (corrected.weight != 2.0) & plain
        kept, cut = kept + free.sum(), cut + (plain & ~free).sum()
    assert kept
    assert cut


@pytest.mark.parametrize("seed", range(3))
def test_metrics_of_frameworks(seed: int):
    responses, advantages = fixed(seed)
    batch = as_batch(responses, advantages)
    compare(presets.verl_metrics(batch), reference_frameworks.verl_metrics(responses))
    compare(presets.slime_metrics(batch), reference_frameworks.slime_metrics(responses))
    for name in presets.TRL:
        rule = name.removeprefix("trl.")
        ours = presets.trl_metrics(batch, weights_alone(presets.TRL[name])(batch))
        compare(ours, reference_frameworks.trl_metrics(rule, responses), name)
    for name, rule in presets.PRIME_RL.items():
        mask = golden(name, responses, advantages).mask
        compare(presets.prime_rl_metrics(batch, rule(batch)), reference_frameworks.prime_rl_metrics(responses, mask))
    for name, rule in presets.AREAL.items():
        result, behaviour = reference_frameworks.areal(name.removeprefix("areal."), responses, advantages)
        ours = presets.areal_metrics(batch, weights_alone(rule)(batch))
        compare(ours, reference_frameworks.areal_metrics(responses, result.mask, behaviour), name)


def compare(ours: dict, theirs: dict[str, float], name: str = "") -> None:
    assert ours.keys() == theirs.keys()
    for key, value in theirs.items():
        assert float(ours[key]) == pytest.approx(value, rel=1e-6, abs=1e-12), (name, key)


def test_areal_reads_a_log_ratio_that_is_not_finite_as_weight_one():
    responses: Responses = [[(-0.5, -math.inf, -0.6), (-1.0, -1.1, -1.3)]]
    batch = as_batch(responses, [1.0])
    for name, rule in presets.AREAL.items():
        expected = golden(name, responses, [1.0]).update
        np.testing.assert_allclose((rule(batch).weight * batch.mask)[0, :2], expected[0], rtol=1e-6)


def test_a_maximum_over_the_response_looks_at_counted_tokens_only():
    """verl's seq_max_k2 by hand: k2 = d^2 / 2; the first response's largest is .08, the masked .5 is no token."""
    d = np.array([[0.4, 1.0, -0.1], [0.2, -0.6, 0.1], [0.3, 0.3, 0.3]])
    mask = np.array([[True, False, True], [True, True, True], [False, False, False]])
    q = np.full((3, 3), -3.0)
    rule = presets.Divergence("k2", "max", 0.1)
    batch = Batch(np.where(mask, q + d, 0.0), np.where(mask, q, 0.0), mask, np.ones((3, 1)))
    assert rule(batch).keep.tolist() == [[True, False, True], [False, False, False], [False, False, False]]


def test_an_unlimited_displacement_of_the_log_odds_is_the_ratio():
    q, d = np.log([0.9, 0.2, 0.5]), np.array([0.05, -0.7, 0.3])
    np.testing.assert_allclose(presets.ratios.log_odds_limit(d, q, math.inf), np.exp(d), rtol=1e-14)


def test_verl_bounds_q_over_pi_and_areal_counts_the_other_tail():
    """Documented as ratio bounds, verl's token_k1 "0.5_5.0" keeps r in [0.2, 2]; AReaL's k3 blows up where p << q."""
    ratio = np.array([[0.15, 0.21, 1.9, 2.1, 4.9]])
    q = np.full((1, 5), -3.0)
    batch = Batch(q + np.log(ratio), q, np.ones((1, 5), bool), np.ones((1, 1)))
    assert presets.verl_k1("token", 0.5, 5.0)(batch).keep.tolist() == [[False, True, True, False, False]]
    d = np.array([[-5.0, 5.0]])
    assert presets.ratios.ESTIMATORS["k3"](d)[0] == pytest.approx([4.0067, 142.4132], abs=1e-4)
    assert presets.ratios.ESTIMATORS["k3_reversed"](d)[0] == pytest.approx([142.4132, 4.0067], abs=1e-4)


# Exact bias.


def enumerated(problem, three) -> tuple[Batch, np.ndarray, np.ndarray]:
    """All sequences of a problem as one batch, each one's probability under q, and its (state, token) pairs."""
    all_episodes = list(reference.episodes(problem))
    width = max(map(len, all_episodes))
    pairs = np.full((len(all_episodes), width, 2), -1)
    for b, e in enumerate(all_episodes):
        pairs[b, : len(e)] = e
    mask = pairs[..., 0] >= 0
    state, token = np.where(mask, pairs[..., 0], 0), np.where(mask, pairs[..., 1], 0)
    probability = np.exp(np.where(mask, three.rollout[state, token], 0.0).sum(-1))
    reward = np.where(mask, problem.reward[state, token], 0.0).sum(-1)
    advantage = reward - (probability * reward).sum()
    whole = {f"logp_{n}_all": getattr(three, n)[state] for n in ("train", "sync", "rollout")}
    drawn = {f"logp_{n}": getattr(three, n)[state, token] for n in ("train", "sync", "rollout")}
    return Batch(mask=mask, advantage=advantage[:, None], **drawn, **whole), probability, np.stack([state, token], -1)


def enumerated_update(correction: Correction, problem, three) -> np.ndarray:
    """E_q of sum_t weight A (e_a - pi - centre) over kept tokens, through the correction's own batch. (S, V)"""
    batch, probability, pairs = enumerated(problem, three)
    weight, keep, centre = correction(batch)
    gain = np.where(keep, weight * batch.advantage * probability[:, None], 0.0)
    total = np.zeros(problem.shape)
    score = np.eye(problem.shape[1])[pairs[..., 1]] - np.exp(three.train)[pairs[..., 0]] - centre
    np.add.at(total, pairs[..., 0], gain[..., None] * score)
    return total


FACTORED = {name: rule for name, rule in presets.PRESETS.items() if rule.factors}
BY_LOOP = ["seq_tis", "seq_mis", "ppo", "ppo_dual", "geo_tis", "geo_mis", "prefix_tis", "gspo", "cispo"]
BY_LOOP += ["dppo", "dppo_kl", "opsm", "cis_raised", "seq_dlc"]


@given(strategies.problems_with_policies())
@settings(max_examples=40)
def test_untruncated_sequence_weights_are_exactly_unbiased(case):
    problem, three = case
    update = enumerated_update(presets.PRESETS["seq_is"], problem, three)
    np.testing.assert_allclose(update, exact.gradient(problem, three.train), atol=1e-10)


@given(strategies.problems_with_policies())
@settings(max_examples=40)
def test_expected_update_of_every_correction_that_factors_is_the_recursions(case):
    problem, three = case
    for name, rule in FACTORED.items():
        expected = exact.expected_update(problem, three, rule)
        np.testing.assert_allclose(enumerated_update(rule, problem, three), expected, atol=1e-10, err_msg=name)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", BY_LOOP)
def test_expected_update_of_every_other_correction_is_the_enumerations(name: str, seed: int):
    rng = np.random.default_rng([seed, 7])
    problem = exact_problem(rng)
    sampler = rng.normal(size=problem.shape)
    three = exact_policies(sampler + rng.normal(0.5, 0.8, problem.shape), sampler, rng.normal(0.2, 0.6, problem.shape))
    expected = reference.expected_update(problem, three.train, three.sync, three.rollout, name)
    update = enumerated_update(presets.PRESETS[name], problem, three)
    np.testing.assert_allclose(update, expected, atol=1e-10)
    assert np.abs(update - exact.gradient(problem, three.train)).max() > 1e-4 or name in ("ppo_dual",)


def exact_problem(rng):
    return Problem(rng.integers(-1, 4, (4, 3)), rng.normal(0.5, 1, (4, 3)), 5, 0)


def exact_policies(train, sync, offset):
    return policies(train, sync, offset)


def test_every_preset_has_bias_and_self_normalised_weights_lose_theirs_with_n():
    """Self-normalised weights mix responses: on the whole population, weighted by q, they are exact."""
    rng = np.random.default_rng(5)
    problem = exact_problem(rng)
    sampler = rng.normal(size=problem.shape)
    three = exact_policies(sampler + rng.normal(0.3, 0.5, problem.shape), sampler, 0.2 * rng.normal(size=problem.shape))
    batch, probability, _ = enumerated(problem, three)
    times = np.round(probability * 200_000).astype(int)  # as many copies as a population of 200,000 holds
    population = batch.rows(np.repeat(np.arange(len(times)), times))
    weight = presets.PRESETS["snis"](population).weight[:, 0]
    exact_weight = presets.PRESETS["seq_is"](population).weight[:, 0]
    np.testing.assert_allclose(weight, exact_weight, rtol=5e-3)


def test_every_framework_has_presets_and_metrics():
    assert {name.partition(".")[0] for name in presets.FRAMEWORKS} == set(presets.METRICS)
    assert all(dataclasses.is_dataclass(rule) for rule in presets.PRESETS.values())


TABLE = Path(__file__).parents[3] / "docs/corrections.md"


def test_the_page_lists_every_preset_as_it_is():
    """`python -m sandbox.corrections.presets` prints the block."""
    block = TABLE.read_text().split("<!-- corrections -->")[1].split("<!-- /corrections -->")[0]
    assert block.strip() == presets.table()


def test_a_rule_is_written_as_it_is_read():
    names = {type(rule).__name__: type(rule) for rule in presets.RULES.values()} | {"inf": math.inf}
    for rule in presets.PRESETS.values():
        assert eval(presets.written(rule), names) == rule


def test_every_preset_reads_back_from_a_config():
    for name, rule in (presets.PRESETS | presets.RULES).items():
        assert config.structure({"rule": name}, Holder).rule == rule
        again = config.structure(json.loads(json.dumps(config.resolved(Holder(rule)))), Holder)
        assert again.rule == rule
    composed = {"preset": "Compose", "rules": [{"preset": "Truncate", "on": "discrepancy"}, "opsm"]}
    assert config.structure({"rule": composed}, Holder).rule == Compose(
        (Truncate(on="discrepancy"), presets.PRESETS["opsm"])
    )


@dataclasses.dataclass(frozen=True)
class Holder:
    rule: Correction
