"""Corrections for off-policy samples: frozen dataclasses that turn a Batch into weights, kept tokens, a centred score.

A correction is data (it sits in a TOML, a sweep, a table) with a short `__call__(batch) -> Corrected`. The update it
stands for is, per response, sum_t weight_t A_t (grad log pi(y_t) - sum_a centre_t(a) grad log pi(a)) over kept tokens;
`losses.reinforce` is that update as a loss. Weights, masks and centres are detached: no gradient passes through them.

Every rule says which log ratio it acts on (`on`, one of `batch.SOURCES`), so the discrepancy and the lag can be
handled apart: `Compose((Truncate(on="discrepancy"), PPOClip(on="lag")))` (`combinations.py`). Resyncing the sampler is
a rule of its own (`resync.py`), as is the learning rate (`TimesEss`). `CORRECTIONS` names the core presets,
`presets.py` the others and those of public frameworks: one line each. `rejections.py` has the rules that only reject.
Thresholds bound trainer/sampler ratios, inclusive; inf (or 0 below) is off.
"""

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol, runtime_checkable

from sandbox.arrays import Array, detach, log, masked, namespace, quiet, widen
from sandbox.batch import Batch, Source, chunks
from sandbox.corrections import ratios
from sandbox.errors import BadInput

Level = Literal["token", "sequence", "geometric", "prefix"]


class Corrected(NamedTuple):
    """What a correction says of a batch; everything detached.

    weight: multiplies advantage times score; >= 0. (B, T) or (B, 1)
    keep: tokens that stay in the loss; rejected ones may or may not stay in its denominator. bool (B, T)
    centre: coefficients k with centred score = grad log pi(y) - sum_a k(a) grad log pi(a), on the columns of the
        batch's `_all` fields: c - pi for a centring distribution c over the whole vocabulary, c - kappa pi over k
        tokens; the number 0.0 where the score is not centred. (B, T, V), (B, T, k) or 0.0
    """

    weight: Array
    keep: Array
    centre: Array | float


@runtime_checkable
class Correction(Protocol):
    """The contract that the tests hold every preset to."""

    @property
    def centres(self) -> bool:
        """Needs the whole vocabulary's (or the top k tokens') log-probabilities (`Batch.logp_*_all`)."""
        ...

    @property
    def factors(self) -> bool:
        """The weight depends on the token's own probabilities alone, so exact recursions over states apply."""
        ...

    def __call__(self, batch: Batch) -> Corrected: ...


def ones(batch: Batch) -> Array:
    """Weight 1 for every token, detached, in the precision that is computed in. (B, T)"""
    return namespace(batch.logp_train).ones_like(widen(detach(batch.logp_train)))


@dataclass(frozen=True)
class Uncorrected:
    """weight 1: the stale, discrepant sample is taken for an on-policy one."""

    centres, factors, source = False, True, ""

    def __str__(self) -> str:
        return "1"

    def __call__(self, batch: Batch) -> Corrected:
        return Corrected(ones(batch), batch.mask, 0.0)


@dataclass(frozen=True)
class Truncate:
    """Truncated importance sampling, min(max(ratio, floor), cap); cap = inf is exact importance sampling.

    Yao, Liu et al. 2025 (token level); Liu, Li et al. 2025 (sequence level). C = 2 is the common default. With a floor
    it is CISPO (MiniMax 2025, arXiv 2506.13585) and slime's "clip". `prefix` weighs a token by the ratio of the
    response so far, itself included.

    Args:
        level, on: of the ratio.
        cap, floor: of the weight.
        clamp: on |log ratio| before exp, as verl and slime have it (20).
        normalise: divide by the mean weight of the batch (after truncation), over tokens at the levels token and
            prefix, over responses else. With cap = inf at sequence level: self-normalised importance sampling.
    """

    level: Level = "token"
    cap: float = 2.0
    on: Source = "total"
    floor: float = 0.0
    clamp: float = math.inf
    normalise: bool = False
    centres, source = False, "Yao, Liu et al. 2025; Liu, Li et al. 2025; MiniMax 2025 (with a floor)"

    def __post_init__(self) -> None:
        ratios.check_bounds(self.floor, self.cap, "floor and cap")

    @property
    def factors(self) -> bool:
        return self.level == "token" and not self.normalise

    def __str__(self) -> str:
        r = ratios.name_of(self.on, self.level)
        low, high = self.floor > 0, not math.isinf(self.cap)
        text = f"min({r}, {self.cap:g})" if high else r
        text = f"min(max({r}, {self.floor:g}), {self.cap:g})" if low else text
        return f"{text} over its batch mean" if self.normalise else text

    def __call__(self, batch: Batch) -> Corrected:
        log_ratio = ratios.select(batch, self.on, self.level, self.clamp)
        if not self.normalise:
            return Corrected(ratios.truncate(log_ratio, self.cap, self.floor), batch.mask, 0.0)
        xp = namespace(log_ratio)
        log_weight = ratios.limit(log_ratio, log(self.floor), log(self.cap))
        per_token = self.level in ("token", "prefix")
        counted = batch.mask if per_token else xp.any(batch.mask, axis=-1, keepdims=True)
        return Corrected(xp.exp(log_weight - ratios.log_mean(log_weight, counted)), batch.mask, 0.0)


@dataclass(frozen=True)
class Mask:
    """Masked importance sampling: weight = ratio where low <= ratio <= high, both included; rejected elsewhere.

    MIS (Liu, Li et al. 2025) has only the upper bound; IcePop (arXiv 2510.18855) is the token band [0.5, 5]. With
    `drop` false a rejected token has weight 0 but stays among the kept ones, as in verl and TRL. With `weigh` false it
    is rejection alone, weight 1 inside: Geo-RS at the geometric level, to be composed with a Truncate.
    """

    level: Level = "token"
    low: float = 0.0
    high: float = 2.0
    on: Source = "total"
    clamp: float = math.inf
    drop: bool = True
    weigh: bool = True
    centres, source = False, "Liu, Li et al. 2025; arXiv 2510.18855 (token band)"

    def __post_init__(self) -> None:
        ratios.check_bounds(self.low, self.high, "low and high")

    @property
    def factors(self) -> bool:
        return self.level == "token"

    def __str__(self) -> str:
        r = ratios.name_of(self.on, self.level)
        inside = ratios.within(r, self.low, self.high)
        return f"{r} where {inside}, else {'rejected' if self.drop else '0'}" if self.weigh else f"keep {inside}"

    def __call__(self, batch: Batch) -> Corrected:
        log_ratio = ratios.select(batch, self.on, self.level, self.clamp)
        inside = ratios.band(log_ratio, self.low, self.high)
        weight = namespace(log_ratio).exp(masked(log_ratio, inside)) if self.weigh else ones(batch)
        return Corrected(masked(weight, inside), batch.mask & inside if self.drop else batch.mask, 0.0)


@dataclass(frozen=True)
class PPOClip:
    """PPO's clipped surrogate (Schulman et al. 2017, eq. 7) against the sampler, as the weight of its gradient.

    min(rho A, clip(rho, 1 - low, 1 + high) A) has gradient rho A score, or none where the clip binds: for A > 0 above
    1 + high, for A < 0 below 1 - low. Clipped tokens stay in the denominator. A finite `dual` also zeroes A < 0 above
    it (dual clip, arXiv 1912.09729). At the geometric level it is GSPO (arXiv 2507.18071), but for the 1/T that its
    loss puts in the denominator. on = "drift" is the decoupled PPO of verl, TRL, slime, AReaL.
    """

    low: float = 0.2
    high: float = 0.2
    dual: float = math.inf
    level: Level = "token"
    on: Source = "total"
    centres, factors, source = False, False, "Schulman et al. 2017; arXiv 2507.18071 (geometric)"

    def __post_init__(self) -> None:
        if not (self.low >= 0 and self.high >= 0):
            raise BadInput(f"low and high are {self.low:g}, {self.high:g}, expected 0 or more; inf is off")

    def __str__(self) -> str:
        dual = "" if math.isinf(self.dual) else f", dual {self.dual:g}"
        return f"PPO in {ratios.name_of(self.on, self.level)}, [{1 - self.low:.5g}, {1 + self.high:.5g}]{dual}"

    def __call__(self, batch: Batch) -> Corrected:
        log_ratio = ratios.select(batch, self.on, self.level)
        above = ~ratios.band(log_ratio, 0.0, 1 + self.high) & (batch.advantage > 0)
        below = ~ratios.band(log_ratio, 1 - self.low, self.dual) & (batch.advantage < 0)
        free = ~(above | below)
        weight = masked(namespace(log_ratio).exp(masked(log_ratio, free)), free)
        return Corrected(weight, batch.mask, 0.0)


@dataclass(frozen=True)
class CIS:
    """Calibrated importance sampling (Yu et al. 2026; our reading of the abstract): truncate in log-odds.

    weight = min(rho, e^cap / (1 + q (e^cap - 1))), at most e^cap; small weights are never raised. A finite `floor`
    (nats, < 0) raises them: the ablation that the paper reports as harmful.
    """

    cap: float = math.log(2.0)
    floor: float = -math.inf
    centres, factors, source = False, True, "Yu, Zhao, Li et al. 2026, our reading"

    def __post_init__(self) -> None:
        ratios.check_bounds(math.exp(self.floor), math.exp(self.cap), "e^floor and e^cap")

    def __str__(self) -> str:
        raised = "" if math.isinf(self.floor) else f", max with floor {self.floor:.3g} in log-odds"
        return f"min(pi/q, e^c / (1 + q (e^c - 1))), c = {self.cap:.3g}{raised}"

    def __call__(self, batch: Batch) -> Corrected:
        log_ratio = ratios.select(batch, "total", "token")
        weight = ratios.log_odds_limit(log_ratio, batch.logp("logp_rollout"), self.cap, self.floor)
        return Corrected(weight, batch.mask, 0.0)


@dataclass(frozen=True)
class Centre:
    """Score centring alone, weight 1: c(.|s) proportional to q min(r, cap), r = pi/mu (`ratios.centring`).

    Over the columns of `Batch.logp_*_all`: the whole vocabulary (exact) or the sampler's top k, at O(k) a token.
    """

    cap: float = 2.0
    centres, factors, source = True, True, "Li, Zhou and Lan 2026, our reading"

    def __post_init__(self) -> None:
        ratios.check_bounds(0.0, self.cap, "0 and cap")

    def __str__(self) -> str:
        return f"score centred at c ~ q min(pi/mu, {self.cap:g})"

    def __call__(self, batch: Batch) -> Corrected:
        counted = batch.mask[..., None]
        train, sync, rollout = (
            quiet(widen(detach(batch.need(field))), counted)
            for field in ("logp_train_all", "logp_sync_all", "logp_rollout_all")
        )
        centre = ratios.centring(rollout, train, train - sync, self.cap)
        return Corrected(ones(batch), batch.mask, masked(centre, counted))


@dataclass(frozen=True)
class DLC:
    """Discrepancy-lag correction (Li, Zhou and Lan 2026; our reading of the abstract): centre d, weight by r.

    weight = min(r, cap) with r = pi/mu, never pi/q; the score is centred at c(.|s) proportional to q min(r, cap) (token
    level) or q r (sequence level: no clip inside the expectation). Pair it with `resync.EssBelow` for the resync.
    """

    level: Level = "token"
    cap: float = 2.0
    centres, source = True, "Li, Zhou and Lan 2026, our reading"

    def __post_init__(self) -> None:
        ratios.check_bounds(0.0, self.cap, "0 and cap")

    @property
    def factors(self) -> bool:
        return self.level == "token"

    def __str__(self) -> str:
        return f"{Truncate(self.level, self.cap, 'lag')} x {Centre(self.cap if self.level == 'token' else math.inf)}"

    def __call__(self, batch: Batch) -> Corrected:
        weight, keep, _ = Truncate(self.level, self.cap, on="lag")(batch)
        return Corrected(weight, keep, Centre(self.cap if self.level == "token" else math.inf)(batch).centre)


@dataclass(frozen=True)
class TimesEss:
    """VCPO's step rule (arXiv 2602.17616): the learning rate is multiplied by ESS^power of the batch, a fraction of n.

    Give it the raw ESS of the weights that the update uses; an undefined ESS (nan) stops the step.
    """

    power: float = 1.0

    def __call__(self, ess: float) -> float:
        return ess**self.power if ess == ess else 0.0


def in_chunks(correction: Correction, batch: Batch, tokens: int = 65536) -> Corrected:
    """The same as `correction(batch)`, a few rows at a time: temporaries stay in the processor's cache.

    Several times faster on a CPU from about 10^6 tokens on. Not for rules that mix responses (`Truncate.normalise`).
    """
    pieces = [correction(piece) for piece in chunks(batch, tokens)]
    xp = namespace(batch.logp_train)
    weight, keep, centre = zip(*pieces, strict=True)
    return Corrected(
        xp.concat(list(weight)), xp.concat(list(keep)), 0.0 if not correction.centres else xp.concat(list(centre))
    )


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
