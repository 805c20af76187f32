"""Corrections for off-policy samples: frozen dataclasses that turn a Batch into weights, kept tokens, a centred score.

A correction is data (it sits in a TOML, a sweep, a table) with a short `__call__(batch) -> Corrected`. The update it
stands for is, per response, sum_t weight_t A_t (grad log pi(y_t) - sum_a centre_t(a) grad log pi(a)) over kept tokens;
`losses.reinforce` is that update as a loss. Weights, masks and centres are detached: no gradient passes through them.
Resyncing the sampler is a rule of its own (`mismatch.py`), as is the learning rate.

`CORRECTIONS` names the presets; another one is one line there. Thresholds bound trainer/sampler ratios; inf is off.
"""

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol, runtime_checkable

from sandbox import ratios
from sandbox.arrays import Array, detach, masked, namespace
from sandbox.batch import Batch

Level = Literal["token", "sequence"]


class Corrected(NamedTuple):
    """What a correction says of a batch; everything detached.

    weight: multiplies advantage times score; >= 0. (B, T) or (B, 1)
    keep: tokens that stay in the loss; rejected ones may or may not stay in its denominator. bool (B, T)
    centre: coefficients k with centred score = grad log pi(y) - sum_a k(a) grad log pi(a), that is c - pi for a
        centring distribution c; the number 0.0 where the score is not centred. (B, T, V) or 0.0
    """

    weight: Array
    keep: Array
    centre: Array | float


@runtime_checkable
class Correction(Protocol):
    """The contract that the tests hold every member of CORRECTIONS to."""

    @property
    def centres(self) -> bool:
        """Needs the whole vocabulary's log-probabilities (`Batch.logp_*_all`)."""
        ...

    @property
    def factors(self) -> bool:
        """The weight depends on the token's own probabilities alone, so exact recursions over states apply."""
        ...

    def __call__(self, batch: Batch) -> Corrected: ...


@dataclass(frozen=True)
class Uncorrected:
    """weight 1: the stale, discrepant sample is taken for an on-policy one."""

    centres = False
    factors = True

    def __call__(self, batch: Batch) -> Corrected:
        ones = namespace(batch.logp_train).ones_like(detach(batch.logp_train))
        return Corrected(ones, batch.mask, 0.0)


@dataclass(frozen=True)
class Truncate:
    """Truncated importance sampling, min(pi/q, cap), token- or sequence-level; cap = inf is exact importance sampling.

    Yao, Liu et al. 2025 (token level); Liu, Li et al. 2025 (sequence level). C = 2 is the common default.
    """

    level: Level = "token"
    cap: float = 2.0
    centres = False

    @property
    def factors(self) -> bool:
        return self.level == "token"

    def __call__(self, batch: Batch) -> Corrected:
        log_ratio = ratios.at_level(detach(batch.total), self.level)
        return Corrected(ratios.truncate(log_ratio, self.cap), batch.mask, 0.0)


@dataclass(frozen=True)
class Mask:
    """Masked importance sampling: weight pi/q where low <= pi/q <= high, both included; rejected elsewhere.

    MIS (Liu, Li et al. 2025) has only the upper bound; IcePop (arXiv 2510.18855) is the token band [0.5, 5].
    """

    level: Level = "token"
    low: float = 0.0
    high: float = 2.0
    centres = False

    @property
    def factors(self) -> bool:
        return self.level == "token"

    def __call__(self, batch: Batch) -> Corrected:
        log_ratio = ratios.at_level(detach(batch.total), self.level)
        inside = ratios.band(log_ratio, self.low, self.high)
        weight = masked(namespace(log_ratio).exp(masked(log_ratio, inside)), inside)
        return Corrected(weight, batch.mask & inside, 0.0)


@dataclass(frozen=True)
class PPOClip:
    """PPO's clipped surrogate (Schulman et al. 2017, eq. 7) against the sampler, as the weight of its gradient.

    min(rho A, clip(rho, 1 - low, 1 + high) A) has gradient rho A score, or none where the clip binds: for A > 0 above
    1 + high, for A < 0 below 1 - low. Clipped tokens stay in the denominator.
    """

    low: float = 0.2
    high: float = 0.2
    centres = False
    factors = False

    def __call__(self, batch: Batch) -> Corrected:
        log_ratio = detach(batch.total)
        above = ~ratios.band(log_ratio, 0.0, 1 + self.high) & (batch.advantage > 0)
        below = ~ratios.band(log_ratio, 1 - self.low, math.inf) & (batch.advantage < 0)
        free = ~(above | below)
        weight = masked(namespace(log_ratio).exp(masked(log_ratio, free)), free)
        return Corrected(weight, batch.mask, 0.0)


@dataclass(frozen=True)
class CIS:
    """Calibrated importance sampling (Yu et al. 2026; our reading of the abstract): truncate in log-odds.

    weight = min(rho, e^cap / (1 + q (e^cap - 1))), at most e^cap; small weights are never raised.
    """

    cap: float = math.log(2.0)
    centres = False
    factors = True

    def __call__(self, batch: Batch) -> Corrected:
        logp_rollout = masked(batch.logp_rollout, batch.mask)
        return Corrected(
            ratios.log_odds_cap(detach(batch.total), logp_rollout, self.cap),
            batch.mask,
            0.0,
        )


@dataclass(frozen=True)
class DLC:
    """Discrepancy-lag correction (Li, Zhou and Lan 2026; our reading of the abstract): centre d, weight by r.

    weight = min(r, cap) with r = pi/mu, never pi/q; the score is centred at c(.|s) proportional to q min(r, cap) (token
    level) or q r (sequence level: no clip inside the expectation). Pair it with `mismatch.EssBelow` for the resync.
    """

    level: Level = "token"
    cap: float = 2.0
    centres = True

    @property
    def factors(self) -> bool:
        return self.level == "token"

    def __call__(self, batch: Batch) -> Corrected:
        xp = namespace(batch.logp_train)
        weight = ratios.truncate(ratios.at_level(detach(batch.lag), self.level), self.cap)
        counted = batch.mask[..., None]
        train, sync, rollout = (
            masked(detach(batch.need(field)), counted)
            for field in ("logp_train_all", "logp_sync_all", "logp_rollout_all")
        )
        inner_cap = self.cap if self.level == "token" else math.inf
        centre = ratios.centring_distribution(rollout, train - sync, inner_cap) - xp.exp(train)
        return Corrected(weight, batch.mask, masked(centre, counted))


CORRECTIONS: dict[str, Correction] = {
    "none": Uncorrected(),
    "tis": Truncate("token", 2.0),
    "seq_tis": Truncate("sequence", 2.0),
    "seq_is": Truncate("sequence", math.inf),
    "mis": Mask("token", 0.0, 2.0),
    "seq_mis": Mask("sequence", 0.0, 2.0),
    "icepop": Mask("token", 0.5, 5.0),
    "ppo": PPOClip(),
    "cis": CIS(),
    "dlc": DLC(),
}
