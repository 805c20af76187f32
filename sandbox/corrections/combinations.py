"""Rules made of rules: several at once, or one that first reads what is not finite as no mismatch."""

from dataclasses import dataclass, replace

from sandbox.arrays import detach, masked, namespace
from sandbox.batch import Batch
from sandbox.corrections.rules import CORRECTIONS, Corrected, Correction, Uncorrected
from sandbox.errors import BadInput


@dataclass(frozen=True)
class Compose:
    """Several rules at once: weights multiplied (0 times anything is 0), masks and-ed, the one centre taken.

    Each rule sees the whole batch, not what the others left of it. Raises BadInput where two rules centre.
    """

    rules: tuple[Correction, ...] = ()
    source = ""

    def __post_init__(self) -> None:
        if sum(rule.centres for rule in self.rules) > 1:
            raise BadInput("rules: two of them centre the score")

    @property
    def centres(self) -> bool:
        return any(rule.centres for rule in self.rules)

    @property
    def factors(self) -> bool:
        return all(rule.factors for rule in self.rules)

    def __str__(self) -> str:
        return " x ".join(map(str, self.rules)) or "1"

    def __call__(self, batch: Batch) -> Corrected:
        first, *others = self.rules or (Uncorrected(),)
        weight, keep, centre = first(batch)
        for rule in others:
            w, k, c = rule(batch)
            live = (weight != 0) & (w != 0)
            weight, keep = masked(masked(weight, live) * masked(w, live), live), keep & k
            centre = centre if isinstance(c, float) else c
        return Corrected(weight, keep, centre)


@dataclass(frozen=True)
class FiniteOnly:
    """The rule, with every log ratio that is not finite read as 0, that is weight 1: AReaL's treatment, not ours."""

    rule: Correction = CORRECTIONS["none"]
    source = ""

    @property
    def centres(self) -> bool:
        return self.rule.centres

    @property
    def factors(self) -> bool:
        return self.rule.factors

    def __str__(self) -> str:
        return f"{self.rule}; old/q = 1 where not finite"

    def __call__(self, batch: Batch) -> Corrected:
        xp = namespace(batch.logp_train)
        bad = batch.mask & ~xp.isfinite(detach(batch.log_ratio("behaviour")))
        old = xp.where(bad, batch.logp_rollout, batch.need("logp_old"))
        return self.rule(replace(batch, logp_old=old))
