"""N1's baseline of stale sequence weights, and what tells first that they fail (VCPO, arXiv 2602.17616).

The estimator is w (R - b) sum_t (e_a - pi), w = pi/q of the response. Any b leaves it unbiased; the one of least total
variance is b = E_q[w^2 |score|^2 R] / E_q[w^2 |score|^2], against the usual b = E_q[R]. Exact where states do not
repeat on a path, so that |score|^2 is a sum over the tokens; a batch estimates it by its own means.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Literal, NamedTuple

import numpy as np

from sandbox.corrections import CORRECTIONS, EveryK
from sandbox.experiments.verdicts import compared, difference, setting, train, updates
from sandbox.metrics import estimators
from sandbox.tabular import enumeration, exact, simulate
from sandbox.tabular.policy import Policies, draw, policies
from sandbox.tabular.problems import PRESETS, Problem
from sandbox.theory.collapse import failure_steps

GROWN = 2.0  # times the norm of the first update since the sync: when the gradient norm raises the alarm
FALLEN = 0.5  # batch ESS that raises it

Kind = Literal["mean", "batch", "exact"]
ALARMS = "first ESS below 1/2 less first norm doubled (updates)"


class Spread(NamedTuple):
    """Total variance over responses of w (R - b) sum_t (e_a - pi), w = pi/q of the sequence, and the baselines b."""

    plain: float  # b = E_q[R]
    least: float  # b = E_q[w^2 |score|^2 R] / E_q[w^2 |score|^2], VCPO's off-policy optimal baseline
    rms: float  # root mean square of the plain estimator's norm: what a dashboard calls the gradient norm
    baseline: float
    optimal: float


def spread(problem: Problem, now: Policies) -> Spread:
    """By enumeration, where no state repeats on a path, so that |score|^2 is a sum over the tokens."""
    pairs = enumeration.sequences(problem)
    mask = pairs >= 0
    pi, q, reward = (
        np.where(mask, x.ravel()[pairs], 0.0).sum(axis=1) for x in (now.train, now.rollout, problem.reward)
    )
    heavy = np.exp(2 * pi - q) * np.where(mask, square(now.train).ravel()[pairs], 0.0).sum(axis=1)  # q w^2 |score|^2
    plain, optimal = float((np.exp(q) * reward).sum()), float((heavy * reward).sum() / heavy.sum())
    drift = float((exact.gradient(problem, now.train) ** 2).sum())
    moments = [float((heavy * (reward - b) ** 2).sum()) for b in (plain, optimal)]
    return Spread(moments[0] - drift, moments[1] - drift, math.sqrt(moments[0]), plain, optimal)


def square(train: np.ndarray) -> np.ndarray:
    """|e_a - pi(.|s)|^2 = 1 - 2 pi(a|s) + sum_b pi(b|s)^2. (..., S, V)"""
    p = np.exp(train)
    return 1 - 2 * p + (p**2).sum(axis=-1, keepdims=True)


def exactly(seed: int) -> dict[str, float]:
    """The exact spread along corrected mean-field training of the sparse tree, never synced, where the ESS first is
    below each level: variance left by the optimal baseline, and growth of the gradient norm since the sync."""
    problem = PRESETS["sparse_tree"](seed).problem
    x = np.zeros(problem.shape)
    fresh, found = spread(problem, policies(x, x)), {}
    start, levels = x, [0.9, 0.5, 0.1]
    for _ in range(200):
        now = policies(x, start)
        while levels and exact.ess(problem, now.train, now.sync) < levels[0]:
            here, level = spread(problem, now), levels.pop(0)
            found[f"ESS {level}: variance with the optimal baseline over E[R]'s"] = here.least / here.plain
            found[f"ESS {level}: gradient norm over that at the sync"] = here.rms / fresh.rms
        x = x + 0.25 * exact.expected_update(problem, now, CORRECTIONS["seq_is"], "normalised")
    return {"ESS 1: variance with the optimal baseline over E[R]'s": fresh.least / fresh.plain} | found


class Followed(NamedTuple):
    """Training by a proposal. returns: exact, the start included, (R, K + 1). ess: of the batch before each update."""

    returns: np.ndarray
    ess: np.ndarray


# of (pairs of a batch, policies): what moves the logits per unit of step size, (R, S, V), and the batch's ESS, (R,)
Proposal = Callable[[np.ndarray, Policies], tuple[np.ndarray, np.ndarray]]


def follow(problem: Problem, cfg: simulate.SimConfig, runs: int, propose: Proposal) -> Followed:
    """Training from the uniform policy whose updates somebody else proposes; synced as `cfg.resync` says."""
    rngs = simulate.generators(cfg.seed, range(runs))
    trainer = sampler = simulate.init(rngs, problem, np.zeros(problem.shape), cfg).trainer
    now, since = policies(trainer, sampler), 0
    returns, sizes = [exact.expectation(problem, now.train, problem.reward)], []
    for _ in range(cfg.steps):
        pairs = draw(problem, now.rollout, np.stack([r.random((cfg.batch_size, problem.horizon)) for r in rngs]))
        update, ess = propose(pairs, now)
        trainer, since = trainer + cfg.step_size * update, since + 1
        if cfg.resync(since, float(ess.mean()), 0.0):
            sampler, since = trainer, 0
        now = policies(trainer, sampler)
        sizes.append(ess)
        returns.append(exact.expectation(problem, now.train, problem.reward))
    return Followed(np.array(returns).T, np.array(sizes).T)


def along(table: np.ndarray, pairs: np.ndarray) -> np.ndarray:
    """Sum of a table over the tokens of each drawn response. (R or 1, S, V), (R, N, T) -> (R, N)"""
    run = np.arange(len(pairs))[:, None, None]
    return np.where(pairs >= 0, table.reshape(len(table), -1)[run % len(table), pairs], 0.0).sum(axis=-1)


def train_weighted(problem: Problem, cfg: simulate.SimConfig, runs: int, kind: Kind) -> tuple[Followed, np.ndarray]:
    """The mean over the batch of w (R - b) score, w untruncated; and the norm of each update, (R, K).

    Args:
        kind: b is the batch's mean reward, the batch's own optimal baseline, or the exact optimal one (`spread`).
    """
    norms = []

    def propose(pairs: np.ndarray, now: Policies) -> tuple[np.ndarray, np.ndarray]:
        log_weight, reward = along(now.train - now.rollout, pairs), along(problem.reward[None], pairs)
        weight = np.exp(log_weight)
        share = np.ones_like(weight) if kind == "mean" else weight**2 * along(square(now.train), pairs)
        baseline = (share * reward).sum(axis=1, keepdims=True) / share.sum(axis=1, keepdims=True)
        if kind == "exact":
            each = [Policies(*three) for three in zip(*now, strict=True)]
            baseline = np.array([[spread(problem, three).optimal] for three in each])
        gain = np.broadcast_to((weight * (reward - baseline))[..., None], pairs.shape)[pairs >= 0]
        at = (np.arange(runs)[:, None, None] * problem.reward.size + pairs)[pairs >= 0]
        mass = np.bincount(at, gain, minlength=now.train.size).reshape(now.train.shape)
        update = exact.centred(mass, np.exp(now.train)) / cfg.batch_size
        norms.append(np.sqrt((update**2).sum(axis=(1, 2))))
        return update, estimators.ess(log_weight)

    done = follow(problem, cfg, runs, propose)
    return done, np.array(norms).T


def alarm(raised: np.ndarray) -> np.ndarray:
    """Update at which an alarm is first raised, inf for never. bool (R, K) -> (R,)"""
    return np.where(raised.any(axis=1), raised.argmax(axis=1) + 1.0, np.inf)


def trained(runs: int, fast: bool, seed: int) -> dict[str, object]:
    """On the sparse tree, untruncated sequence weights. Criteria, written before the run:

    * the optimal baseline helps where its final return less that of the mean reward is > 0 (lower 95 % limit), never
      synced and every 8. The batch's own is what a trainer has; the exact one tells its error from its worth;
    * the ESS is the earlier alarm where the mean difference of the first updates with batch ESS < 1/2 and with a
      gradient norm twice that of the first update is < 0 (upper limit), never counting as after the last update;
      the norm is, where it is > 0. Beside it: how many of the runs fail, and the lead of each alarm on failure_step.
    """
    problem, cfg = setting("tree", seed)
    steps, measured = updates("tree", fast), {}
    # the advantage is not divided by sd(R), about .3 on this tree: three times the rate makes up for it
    cfg = replace(cfg, step_size=3 * cfg.step_size, steps=steps)
    on = train("tree", replace(setting("tree", seed).cfg, steps=steps, resync=EveryK(1)), runs, 1000)
    for name, resync in (("never synced", cfg.resync), ("synced every 8", EveryK(8))):
        kinds: tuple[Kind, ...] = ("mean", "batch", "exact")
        done = [train_weighted(problem, replace(cfg, resync=resync), runs, kind) for kind in kinds]
        ends = [x.returns[:, -max(1, steps // 10) :].mean(axis=1) for x, _ in done]
        for kind, end in zip(kinds[1:], ends[1:], strict=True):
            gained = compared(difference, end, ends[0], paired=True)
            measured[f"tree, {name}: optimal baseline ({kind}) less mean reward"] = gained
        if name == "never synced":
            plain, norms = done[0]
            ess, norm = alarm(plain.ess < FALLEN), alarm(norms > GROWN * norms[:, :1])
            failure = failure_steps(plain.returns, on.returns)
            early = [np.minimum(x, steps + 1) for x in (ess, norm, failure)]
            measured[ALARMS] = compared(difference, *early[:2], paired=True)
            measured["ESS below 1/2, mean update"], measured["norm doubled, mean update"] = (
                float(x.mean()) for x in early[:2]
            )
            measured["failing runs, never synced"] = float(np.isfinite(failure).mean())
            measured["failure_step, mean update"] = float(early[2].mean())
    return measured
