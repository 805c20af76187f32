"""Monte Carlo training: one update against scalar loops and against its expectation, independence of runs, resyncs."""

import math
from dataclasses import dataclass, replace

import numpy as np
import polars as pl
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from numpy.testing import assert_allclose

from sandbox.batch import Batch
from sandbox.corrections import CORRECTIONS, DLC, Corrected, EssBelow, EveryK, Truncate
from sandbox.errors import BadInput
from sandbox.metrics import estimators
from sandbox.tabular import exact, problems, simulate
from sandbox.tabular.policy import ConstantOffset, Policies, draw, log_policy, policies
from sandbox.tabular.problems import Problem
from sandbox.tabular.simulate import SimConfig
from tests.support import reference, strategies
from tests.support.strategies import random_logits

ALL = CORRECTIONS | {"seq_dlc": DLC("sequence")}
MIXING = {"snis": Truncate("sequence", math.inf, normalise=True)}  # weights over the batch's mean weight


def stacked(three: Policies, runs: int = 1) -> Policies:
    return Policies(*(np.repeat(p[None], runs, axis=0) for p in three))


@pytest.mark.parametrize("name", list(ALL))
@given(case=strategies.problems_with_policies(), seed=st.integers(0, 2**32), normalised=st.booleans())
def test_update_equals_a_loop_over_responses_and_tokens(name, case, seed, normalised):
    problem, three = case
    uniform = np.random.default_rng(seed).random((1, 8, problem.horizon))
    pairs = draw(problem, three.rollout[None], uniform)
    batch = [[divmod(x, problem.shape[1]) for x in row if x >= 0] for row in pairs[0].tolist()]
    rewards = [reference.reward(problem, e) for e in batch]
    # A normalised advantage of rewards that differ by rounding is rounding.
    assume(len(set(rewards)) == 1 or np.ptp(rewards) > 1e-6)
    cfg = SimConfig(ALL[name], batch_size=8, advantage="normalised" if normalised else "centred")
    update = simulate.update(problem, stacked(three), pairs, cfg)[0]
    expected = reference.batch_update(problem, three.train, three.sync, three.rollout, batch, name, normalised)
    assert_allclose(update, expected, rtol=1e-9, atol=1e-9)


def asymmetric_case() -> tuple[Problem, Policies]:
    """A tree with binary rewards (so that the sign of the advantage, which PPO looks at, does not depend on the batch
    mean), strongly lagging and discrepant."""
    rng = np.random.default_rng(7)
    problem = problems.tree(3, 3, (rng.random(27) < 0.3).astype(float))
    sampler = random_logits(rng, problem, 0.7)
    lag, offset = rng.normal(0.3, 0.6, problem.shape), rng.normal(0.2, 0.5, problem.shape)
    return problem, policies(sampler + lag, sampler, offset)


@pytest.mark.parametrize("name", ["none", "tis", "dlc", "seq_tis", "ppo"])
def test_mean_update_is_the_expected_update(name):
    """4,000 batches of 32: the batch mean as baseline makes the expectation (1 - 1/32) times that of THEORY section 3.
    39 entries within 5 standard errors: false alarm 2e-5 for each correction; the seed is fixed."""
    problem, three = asymmetric_case()
    runs, n = 4_000, 32
    uniform = np.random.default_rng(11).random((runs, n, 3))
    many = stacked(three, runs)
    cfg = SimConfig(CORRECTIONS[name], batch_size=n, advantage="centred")
    updates = simulate.update(problem, many, draw(problem, many.rollout, uniform), cfg)
    mean, error = updates.mean(axis=0), updates.std(axis=0) / math.sqrt(runs)
    expected = (1 - 1 / n) * reference.expected_update(problem, *three, name)
    assert np.all(np.abs(mean - expected) <= 5 * error + 1e-15)
    if name in exact.EXACT_CORRECTIONS:
        assert_allclose((1 - 1 / n) * exact.expected_update(problem, three, CORRECTIONS[name]), expected, atol=1e-12)
    # The bound is tight enough to tell a correction from the others, and a flipped sign from the right one.
    for other in {"none", "tis", "dlc", "seq_tis", "ppo"} - {name}:
        wrong = (1 - 1 / n) * reference.expected_update(problem, *three, other)
        assert np.any(np.abs(mean - wrong) > 8 * error), other
    assert np.any(np.abs(mean + expected) > 8 * error)


@pytest.fixture(scope="module")
def machine() -> Problem:
    return problems.state_machine(np.random.default_rng(0), 5, 3, 12)


def test_a_run_does_not_depend_on_the_runs_beside_it(machine):
    cfg = SimConfig(CORRECTIONS["dlc"], EssBelow(0.8, 1.645), ConstantOffset(0.1), steps=15, batch_size=32, seed=5)
    logits = random_logits(np.random.default_rng(1), machine)
    together = simulate.run(machine, logits, cfg, [0, 3, 4])
    for place, run in enumerate([0, 3, 4]):
        alone = simulate.run(machine, logits, cfg, [run])
        assert together.table.filter(pl.col("run") == run).equals(alone.table)
        assert np.array_equal(together.state.trainer[place], alone.state.trainer[0])
        assert np.array_equal(together.state.log_offset[place], alone.state.log_offset[0])
    assert together.table.filter(pl.col("run") == 0)["ess"][0] != together.table.filter(pl.col("run") == 3)["ess"][0]
    other = simulate.run(machine, logits, SimConfig(steps=1, batch_size=32, seed=6), [0])
    assert (
        other.table["ess"][0] != simulate.run(machine, logits, SimConfig(steps=1, batch_size=32), [0]).table["ess"][0]
    )


@pytest.mark.parametrize("name", ["none", "dlc", "seq_tis", "seq_dlc", "snis"])
def test_groups_and_threads_change_nothing(machine, monkeypatch, name):
    cfg = SimConfig((ALL | MIXING)[name], EssBelow(0.8), ConstantOffset(0.1), steps=12, batch_size=32, seed=5)
    logits = random_logits(np.random.default_rng(1), machine)
    whole = simulate.run(machine, logits, cfg, range(7))
    monkeypatch.setattr(simulate, "TOGETHER", 2)
    parts = simulate.run(machine, logits, cfg, range(7), threads=3)
    assert parts.table.equals(whole.table)
    for field in ("trainer", "sampler", "log_offset", "since_sync", "syncs"):
        assert np.array_equal(getattr(parts.state, field), getattr(whole.state, field))
    for one, other in zip(parts.state.policies, whole.state.policies, strict=True):
        assert np.array_equal(one, other)


def test_training_is_the_plain_loop(machine):
    """The yardstick of the benchmarks, from the same generator: fifteen updates to rounding."""
    from benchmarks import plain

    for name in ("none", "tis", "dlc"):
        cfg = SimConfig(ALL[name], steps=15, batch_size=64, step_size=0.7, readings=False)
        result = simulate.run(machine, np.zeros(machine.shape), cfg, [3])
        (rng,) = simulate.generators(0, [3])
        cfg.discrepancy(rng, machine.shape)  # drawn first
        trained = plain.train(rng, machine, 0.7, 64, 15, name)
        assert_allclose(result.state.trainer[0], trained, atol=1e-10)
        assert result.table["ess"].is_nan().all()
        assert result.table["batch_ess"].is_finite().all()


def test_table_says_what_the_recursions_say(machine):
    cfg = SimConfig(CORRECTIONS["tis"], EveryK(3), ConstantOffset(0.2), steps=4, batch_size=16)
    # Not from the uniform policy: there log mu is one number, and an ESS does not see a number added to the lag.
    logits, rngs = random_logits(np.random.default_rng(1), machine), simulate.generators(0, range(2))
    state = simulate.init(rngs, machine, logits, cfg)
    table = simulate.run(machine, logits, cfg, range(2)).table
    for k in range(1, 5):
        before = state
        state, info = simulate.step(rngs, machine, state, cfg)
        for run in range(2):
            now = policies(state.trainer[run], before.sampler[run], state.log_offset[run])
            expected = {
                "run": run,
                "step": k,
                "since_sync": [1, 2, 3, 1][k - 1],
                "return": exact.expectation(machine, now.train, machine.reward),
                "return_sampler": exact.expectation(machine, now.rollout, machine.reward),
                "ess": exact.ess(machine, now.train, now.sync),
                "token_kl": exact.token_kl(machine, now.train, now.rollout),
                "syncs": [0, 0, 1, 1][k - 1],
                "batch_ess": info.batch_ess[run],
            }
            row = table.filter((pl.col("run") == run) & (pl.col("step") == k)).row(0, named=True)
            assert row.keys() == expected.keys()
            assert_allclose([row[x] for x in expected], list(expected.values()), rtol=1e-12)
        assert np.array_equal(state.sampler, state.trainer if k == 3 else before.sampler)
        assert_allclose(state.policies.train, policies(state.trainer, state.sampler).train)


def test_on_policy_training_has_no_lag_and_learns(machine):
    cfg = SimConfig(resync=EveryK(1), steps=60, batch_size=64, step_size=0.5)
    table = simulate.run(machine, np.zeros(machine.shape), cfg, range(4)).table
    assert table["batch_ess"].to_list() == pytest.approx([1.0] * len(table), abs=1e-12)
    assert set(table["since_sync"]) == {1}
    last = table.filter(pl.col("step") == 60)
    assert last["syncs"].to_list() == [60] * 4
    assert last["return"].min() > 0.9


def test_a_constant_offset_is_there_at_zero_lag(machine):
    cfg = SimConfig(resync=EveryK(1), discrepancy=ConstantOffset(0.3), steps=3, step_size=1e-9)
    table = simulate.run(machine, np.zeros(machine.shape), cfg, range(3)).table
    assert table["token_kl"].min() > 0.005
    assert table["ess"].min() > 1 - 1e-9
    assert (table["return"] - table["return_sampler"]).abs().min() > 1e-4


@pytest.mark.parametrize("z", [0.0, 1.645])
def test_ess_rule_sees_the_batch_and_syncs_after_it_is_used(machine, z):
    cfg = SimConfig(CORRECTIONS["tis"], EssBelow(0.6, z), ConstantOffset(0.2), steps=40, batch_size=64)
    rngs = simulate.generators(0, range(6))
    state = simulate.init(rngs, machine, np.zeros(machine.shape), cfg)
    synced = 0
    for _ in range(cfg.steps):
        before = state
        # The same draws once more, from copies of the generators.
        copies = [np.random.Generator(type(r.bit_generator)()) for r in rngs]
        for copy, rng in zip(copies, rngs, strict=True):
            copy.bit_generator.state = rng.bit_generator.state
        uniform = np.stack([r.random((64, machine.horizon)) for r in copies])
        pairs = draw(machine, before.policies.rollout, uniform)
        state, info = simulate.step(rngs, machine, state, cfg)
        for run in range(6):
            lag = (before.policies.train - before.policies.sync)[run].ravel()
            log_weight = np.array([sum(lag[x] for x in row if x >= 0) for row in pairs[run]])
            ess = float(estimators.ess(log_weight))
            error = estimators.ess_standard_error(log_weight, np.arange(64))
            assert math.isclose(info.batch_ess[run], ess)
            assert info.synced[run] == (ess - z * error < 0.6)
            assert np.array_equal(state.sampler[run], (state.trainer if info.synced[run] else before.sampler)[run])
            assert state.since_sync[run] == (0 if info.synced[run] else before.since_sync[run] + 1)
        synced += info.synced.sum()
    assert synced > 6


@pytest.mark.parametrize("name", list(ALL))
def test_every_correction_trains_on_policy(name, machine):
    """At zero mismatch each of them is plain policy gradient, to rounding."""
    cfg = SimConfig(ALL[name], EveryK(1), steps=5, batch_size=32, step_size=0.5)
    plain = SimConfig(resync=EveryK(1), steps=5, batch_size=32, step_size=0.5)
    logits = random_logits(np.random.default_rng(1), machine)
    result, expected = (simulate.run(machine, logits, c, range(2)) for c in (cfg, plain))
    assert_allclose(result.state.trainer, expected.state.trainer, atol=1e-10)


def test_the_penalty_adds_its_exact_gradient(machine):
    """A step with it less the same step without it is -eta beta grad KL(pi || uniform), by finite differences."""
    logits, beta, h = random_logits(np.random.default_rng(2), machine), 0.3, 1e-5
    cfg = SimConfig(CORRECTIONS["tis"], discrepancy=ConstantOffset(0.1), steps=1, batch_size=16, step_size=0.7)
    plain, pulled = (simulate.run(machine, logits, replace(cfg, penalty=b), [3]).state for b in (0.0, beta))
    uniform = np.full(machine.shape, -math.log(machine.shape[1]))
    slope = np.empty(machine.shape)
    for index in np.ndindex(*machine.shape):
        unit = np.zeros(machine.shape)
        unit[index] = h
        ahead, behind = (exact.kl(machine, log_policy(logits + sign * unit), uniform) for sign in (1, -1))
        slope[index] = (ahead - behind) / (2 * h)
    assert_allclose(pulled.trainer[0] - plain.trainer[0], -0.7 * beta * slope, rtol=1e-6, atol=1e-9)
    assert_allclose(pulled.policies.train, log_policy(pulled.trainer), atol=1e-14)
    assert_allclose(exact.kl_gradient(machine, log_policy(logits)), slope, rtol=1e-6, atol=1e-9)


@dataclass(frozen=True)
class Reject:
    """A correction that rejects tokens by `keep` alone, and leaves their weight at 1."""

    factors: bool
    centres = False

    def __call__(self, batch: Batch) -> Corrected:
        return Corrected(np.ones(batch.logp_train.shape), batch.mask & (batch.total > 0), 0.0)


def test_a_rejected_token_has_no_part_in_the_update():
    problem, three = asymmetric_case()
    many = stacked(three)
    pairs = draw(problem, many.rollout, np.random.default_rng(0).random((1, 50, 3)))
    updates = [simulate.update(problem, many, pairs, SimConfig(Reject(f), batch_size=50)) for f in (True, False)]
    assert_allclose(updates[0], updates[1], atol=1e-12)
    everything = simulate.update(problem, many, pairs, SimConfig(batch_size=50))
    assert np.abs(updates[0] - everything).max() > 0.1
    weight = exact.token_weights(three, Reject(True)).weight
    assert np.array_equal(weight, (three.train > three.rollout).astype(float))


def test_ess_steps_counts_from_the_sync_and_says_inf_for_none():
    table = pl.DataFrame(
        {
            "run": [0, 0, 0, 0, 1, 1, 1, 1],
            "since_sync": [1, 2, 1, 2, 1, 2, 3, 4],
            "ess": [0.9, 0.8, 0.7, 0.4, 0.9, 0.8, 0.7, 0.6],
        }
    )
    assert simulate.ess_steps(table)["ess_step"].to_list() == [2.0, math.inf]
    assert simulate.ess_steps(table, 0.75)["ess_step"].to_list() == [1.0, 3.0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"penalty": -1.0}, "penalty"),
        ({"batch_size": 1}, "batch_size"),
        ({"steps": 0}, "steps"),
        ({"advantage": "raw"}, "advantage"),
    ],
)
def test_impossible_configs_are_refused(change, message):
    with pytest.raises(BadInput, match=message):
        SimConfig(**change)


def test_logits_of_another_shape_are_refused(machine):
    with pytest.raises(BadInput, match="logits has shape"):
        simulate.run(machine, np.zeros((2, 2)), SimConfig(steps=1))


@pytest.mark.parametrize("name", ["none", "dlc", "seq_tis"])
def test_responses_that_end_early_train_as_their_batch_says(name):
    """A machine whose second token often ends: a step of two runs against drawing and updating, run by run."""
    rng = np.random.default_rng(3)
    transition = np.array([[1, problems.END, 2], [problems.END, 2, 0], [1, 0, problems.END]])
    problem = Problem(transition, rng.normal(0.4, 1, (3, 3)), horizon=9, initial=1)
    cfg = SimConfig(ALL[name], discrepancy=ConstantOffset(0.3), batch_size=16, step_size=0.5, steps=3, seed=2)
    rngs, again = (simulate.generators(2, [1, 4]) for _ in range(2))
    logits = rng.normal(0.2, 0.7, (3, 3))
    state = simulate.init(rngs, problem, logits, cfg)
    simulate.init(again, problem, logits, cfg)
    for _ in range(3):
        pairs = draw(problem, state.policies.rollout, np.stack([r.random((16, 9)) for r in again]))
        lengths = (pairs >= 0).sum(axis=-1)
        assert 1 < lengths.mean() < 9
        expected = state.trainer + 0.5 * simulate.update(problem, state.policies, pairs, cfg)
        lag = (state.policies.train - state.policies.sync).reshape(2, -1)
        sums = [[lag[run][x[x >= 0]].sum() for x in rows] for run, rows in enumerate(pairs)]
        state, info = simulate.step(rngs, problem, state, cfg)
        assert_allclose(state.trainer, expected, rtol=1e-10, atol=1e-12)
        assert_allclose(info.batch_ess, estimators.ess(np.array(sums)), rtol=1e-10)
