"""When the sampler loads the trainer's weights: a rule answers "sync after this update?" from what a loop has at hand.

Simulations, real-model runs and the adapters share the rules. `RESYNCS` names the presets.
"""

import math
from dataclasses import dataclass
from typing import Protocol

from sandbox.errors import BadInput, positive


class Resync(Protocol):
    """Sync after this update?"""

    def __call__(self, steps: int, ess: float, ess_error: float, token_kl: float | None = None) -> bool:
        """Whether the sampler loads the trainer's weights after the update that this batch gave.

        Args:
            steps: optimiser updates since the last sync, this one included.
            ess: raw sequence lag ESS of the batch that the update used (global batch, fraction of n), in [1/n, 1].
            ess_error: its standard error.
            token_kl: KL(q || pi) a token on the sampler's prefixes, estimated on that batch, nats; None where the loop
                does not measure it.
        """
        ...


@dataclass(frozen=True)
class Never:
    """The sampler keeps its first weights."""

    def __call__(self, steps: int, ess: float, ess_error: float, token_kl: float | None = None) -> bool:
        return False


@dataclass(frozen=True)
class EveryK:
    """Sync after every k-th update; k = 1 is on-policy training."""

    k: int = 1

    def __post_init__(self) -> None:
        if self.k < 1:
            raise BadInput(f"k is {self.k}, expected at least 1")

    def __call__(self, steps: int, ess: float, ess_error: float, token_kl: float | None = None) -> bool:
        return steps >= self.k


@dataclass(frozen=True)
class EssBelow:
    """Sync once ess - z standard errors < threshold; the batch that triggers the rule is still used (THEORY section 2).

    z = 0 is the rule of DLC. z = 1.645 syncs as soon as the one-sided 95 % lower limit passes the threshold: a batch of
    256 cannot date a collapse (at a true 1/2 its value spans .41-.60). An undefined ESS (nan: every weight 0) syncs.
    """

    threshold: float = 0.5
    z: float = 0.0

    def __post_init__(self) -> None:
        if not 0 < self.threshold <= 1:
            raise BadInput(f"threshold is {self.threshold}, expected a number in (0, 1]")
        if not -math.inf < self.z < math.inf:
            raise BadInput(f"z is {self.z}, expected a finite number")

    def __call__(self, steps: int, ess: float, ess_error: float, token_kl: float | None = None) -> bool:
        return not ess - self.z * ess_error >= self.threshold


@dataclass(frozen=True)
class KlAbove:
    """Sync once the KL(q || pi) a token on the sampler's prefixes, which most trainers watch, exceeds `threshold` nats.

    It sees the average token, not the product over a response, on which the ESS depends. An undefined KL (nan) syncs.
    """

    threshold: float = 0.01

    def __post_init__(self) -> None:
        positive("threshold", self.threshold)

    def __call__(self, steps: int, ess: float, ess_error: float, token_kl: float | None = None) -> bool:
        if token_kl is None:
            raise BadInput("resync 'kl_above' needs the KL a token of a batch, which is not measured here")
        return not token_kl <= self.threshold


RESYNCS: dict[str, Resync] = {
    "never": Never(),
    "every": EveryK(1),
    "ess_below": EssBelow(),
    "ess_lower": EssBelow(z=1.645),
    "kl_above": KlAbove(),
}
