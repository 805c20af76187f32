"""Rules that only reject: weight 1, a mask. Compose them with a weight (`corrections.Truncate`, `corrections.PPOClip`).

Bounds are inclusive, and on trainer/sampler ratios or on nats, as each says. inf (or 0 below) is off.
"""

import math
from dataclasses import dataclass
from typing import Literal

from sandbox.arrays import Array, detach, masked_mean, namespace
from sandbox.batch import SOURCES, Batch, Source
from sandbox.corrections import ratios
from sandbox.corrections.rules import Corrected, ones
from sandbox.errors import BadInput


@dataclass(frozen=True)
class Veto:
    """A response is dropped whole when any of its token ratios lies outside [low, high] (slime, miles, SkyRL)."""

    low: float = 1e-4
    high: float = math.inf
    on: Source = "total"
    centres, factors, source = False, False, "slime"

    def __post_init__(self) -> None:
        ratios.check_bounds(self.low, self.high, "low and high")

    def __str__(self) -> str:
        return f"drop response unless every {ratios.within(ratios.name_of(self.on), self.low, self.high)}"

    def __call__(self, batch: Batch) -> Corrected:
        inside = ratios.band(ratios.select(batch, self.on, "token"), self.low, self.high) | ~batch.mask
        kept = namespace(inside).all(inside, axis=-1, keepdims=True)
        return Corrected(ones(batch), batch.mask & kept, 0.0)


@dataclass(frozen=True)
class Divergence:
    """Rejection by an estimate of the divergence: keep where aggregate(estimator(log ratio)) <= limit.

    verl's rollout_rs token_k2, seq_mean_k3, ...; NeMo-RL's seq_logprob_error_threshold ("multiplicative", "mean").

    Args:
        estimator: one of `ratios.ESTIMATORS`, nats.
        aggregate: token, or sum, mean, max over the response.
        limit: nats (for multiplicative: a ratio), included.
        clamp: on |log ratio| first (verl: 20).
    """

    estimator: str = "k3"
    aggregate: str = "mean"
    limit: float = 0.01
    on: Source = "total"
    clamp: float = math.inf
    centres, source = False, "verl"

    @property
    def factors(self) -> bool:
        return self.aggregate == "token"

    def __post_init__(self) -> None:
        if self.estimator not in ratios.ESTIMATORS:
            raise BadInput(f"estimator is {self.estimator!r}, expected one of {', '.join(ratios.ESTIMATORS)}")

    def __str__(self) -> str:
        return f"keep {self.aggregate} {self.estimator}({ratios.name_of(self.on)}) <= {self.limit:g}"

    def __call__(self, batch: Batch) -> Corrected:
        value = ratios.ESTIMATORS[self.estimator](ratios.select(batch, self.on, "token", self.clamp))
        kept = ratios.aggregate(value, self.aggregate, batch.mask) <= self.limit
        return Corrected(ones(batch), batch.mask & kept, 0.0)


@dataclass(frozen=True)
class ProbabilityBand:
    """Rejection by the difference of probabilities p - q of the drawn token (DPPO, arXiv 2602.04879).

    With A > 0 a token is dropped where p has already risen by more than `high`; with A <= 0 where it has fallen by more
    than `low`. `both_ways` drops either regardless of A (prime-rl's "ipo"). divergence = "kl" compares the Bernoulli
    KL(q || p) of the token against all others with the same limits. Weight 1: compose it with a Truncate.
    """

    low: float = 0.2
    high: float = 0.2
    divergence: Literal["tv", "kl"] = "tv"
    both_ways: bool = False
    on: Source = "total"
    centres, factors, source = False, False, "arXiv 2602.04879"

    def __str__(self) -> str:
        p, q = ratios.name_of(self.on).split("/")
        if self.divergence == "kl":
            text = f"Bernoulli KL({q}, {p}) <= {self.high:g}"
        else:
            text = f"-{self.low:g} <= {p} - {q} <= {self.high:g}"
        return f"keep {text}, {'whatever A' if self.both_ways else 'by the sign of A'}"

    def __call__(self, batch: Batch) -> Corrected:
        xp = namespace(batch.logp_train)
        p, q = (xp.exp(detach(batch.logp(field))) for field in SOURCES[self.on])
        size = xp.abs(p - q) if self.divergence == "tv" else bernoulli_kl(q, p)
        rises = (p > q) & (size > self.high)
        falls = (p < q) & (size > self.low)
        if not self.both_ways:
            rises, falls = rises & (batch.advantage > 0), falls & (batch.advantage <= 0)
        return Corrected(ones(batch), batch.mask & ~(rises | falls), 0.0)


def bernoulli_kl(q: Array, p: Array) -> Array:
    """KL of Bernoulli(q) from Bernoulli(p): q log(q/p) + (1-q) log((1-q)/(1-p)), each probability at least 1e-8."""
    xp = namespace(q)
    a, b, c, d = (ratios.limit(x, 1e-8, math.inf) for x in (q, p, 1 - q, 1 - p))
    return q * xp.log(a / b) + (1 - q) * xp.log(c / d)


@dataclass(frozen=True)
class OffPolicySequenceMask:
    """OPSM (DeepSeek-V3.2, arXiv 2512.02556, eq. 9): drop a response of negative advantage that the trainer disowns.

    Keep iff mean advantage >= 0 or mean_t(-log ratio) <= delta. Whole responses: the sign is that of the mean
    advantage over counted tokens, never a token's own. on: TRL and ms-swift total (pi/q), slime drift (pi/old).
    """

    delta: float = 0.1
    on: Source = "total"
    centres, factors, source = False, False, "DeepSeek-V3.2, arXiv 2512.02556"

    def __str__(self) -> str:
        return f"drop response if A < 0 and mean -log {ratios.name_of(self.on)} > {self.delta:g}"

    def __call__(self, batch: Batch) -> Corrected:
        xp = namespace(batch.logp_train)
        one = ones(batch)
        advantage = masked_mean(batch.advantage * one, batch.mask, axis=-1, keepdims=True)
        distance = -ratios.select(batch, self.on, "geometric")
        kept = xp.asarray(advantage >= 0) | (distance <= self.delta)
        return Corrected(one, batch.mask & kept, 0.0)
