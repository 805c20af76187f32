"""`report(batch)`: every diagnostic at once, of raw weights unless a name says otherwise.

The tokens are read once (`summary.summarise`); what stands here is algebra on (B,) arrays in float64. Units: nats; log
ratios are trainer minus sampler; "sequence" is the product over the tokens of a response.
"""

import math
from dataclasses import dataclass

import numpy as np

from sandbox.arrays import Array
from sandbox.batch import Batch
from sandbox.corrections import Corrected
from sandbox.metrics import estimators
from sandbox.metrics.estimators import Decomposition
from sandbox.metrics.summary import PROBABILITY_EDGES, Summary, summarise


@dataclass(frozen=True)
class Ess:
    """Effective sample size as a fraction of n units, with what it takes to believe it."""

    unit: str
    raw: float
    n: int
    low: float  # bootstrap interval over responses or prompts
    high: float
    pareto_k: float
    pareto_k_limit: float
    renyi2: float
    chi2: float


@dataclass(frozen=True)
class Applied:
    """The weights a correction gave, rejected ones as 0 and in n. `ess` is flattered by truncation: never the alarm."""

    unit: str
    ess: float
    n: int
    mean: float  # over kept units
    largest: float
    rejected_fraction: float  # of tokens


@dataclass(frozen=True)
class Tails:
    """Of the token ratios e^t and of the responses' products: one number never tells both."""

    top_share_token: float  # of the total weight, held by the largest 1 %
    top_share_sequence: float
    kurtosis: float  # of t, excess: 0 for a normal distribution
    smallest_ratio: float
    largest_ratio: float
    multiplicative: float  # mean e^|t|: +t and -t do not cancel as they do in a geometric mean
    largest_response_geometric: float  # max over responses of |mean t|


@dataclass(frozen=True)
class Profile:
    """Of t by position or by the sampler's probability; a bin is [edge, next edge). nan where empty."""

    edges: tuple[float, ...]
    n: tuple[int, ...]
    mean: tuple[float, ...]
    mean_square: tuple[float, ...]


@dataclass(frozen=True)
class Report:
    """Every diagnostic of one batch. `alarms` belongs in front of a person."""

    n_responses: int
    n_tokens: int
    ess: dict[str, Ess]  # sequence, token: of pi/q; where logp_sync is known also sequence_lag, sequence_discrepancy
    applied: Applied | None
    kl_sampler_train: dict[str, float]  # k1, k2, k3 of KL(q || pi) per token, mean over tokens
    kl_sampler_train_by_response: dict[str, float]  # the same, mean over responses of their token means
    decomposition: Decomposition | None
    tails: Tails
    by_position: Profile
    by_probability: Profile
    perplexity: dict[str, float]  # train, rollout: mean over responses; ratio: mean of train / rollout
    alarms: tuple[str, ...]


def report(
    batch: Batch | Summary, corrected: Corrected | None = None, group: Array | None = None, seed: int = 0
) -> Report:
    """Every diagnostic of a batch, or of a summary of one.

    Args:
        corrected: what a correction said of the batch, to report on its weights beside the raw ones.
        group: prompt of each response, the unit of the bootstrap; each response its own without it. int (B,)
        seed: of the bootstrap.
    """
    s = batch if isinstance(batch, Summary) else summarise(batch, corrected)
    sums, has = s.sums, s.sums["n"] > 0
    group = None if group is None else np.asarray(group)[has]
    sums = {name: value[has] for name, value in sums.items()}
    tokens = sums["n"].sum()
    times = estimators.resamples(np.random.default_rng(seed), len(sums["n"]), group)
    units = {"sequence": "t"} | ({"sequence_lag": "g", "sequence_discrepancy": "d"} if s.split else {})
    ess = {name: _sequence_ess(sums[of], times) for name, of in units.items()}
    ess["token"] = _token_ess(sums, s.top, times)
    with np.errstate(invalid="ignore", over="ignore"):  # a ratio of 0 or inf: its means are infinite or nan, and say so
        by_token = {k: _over(sums[k].sum(), tokens) for k in ("k1", "k2", "k3")}
        by_response = {k: _mean(sums[k] / sums["n"]) for k in ("k1", "k2", "k3")}
        perplexity = {
            "train": _mean(np.exp(-sums["train"] / sums["n"])),
            "rollout": _mean(np.exp(-sums["rollout"] / sums["n"])),
            "ratio": _mean(np.exp(-sums["t"] / sums["n"])),
        }
        split = [_over(sums[k].sum(), tokens) for k in ("dd", "gg", "tt", "dg")] if s.split else []
        tails = _tails(sums, s.top, tokens, s.shift)
    return Report(
        n_responses=len(sums["n"]),
        n_tokens=int(tokens),
        ess=ess,
        applied=_applied(sums, s.weighted),
        kl_sampler_train=by_token,
        kl_sampler_train_by_response=by_response,
        decomposition=Decomposition(split[0], split[1], split[2], 2 * split[3]) if split else None,
        tails=tails,
        by_position=_profile(*_by_octave(s.position)),
        by_probability=_profile((0.0, *PROBABILITY_EDGES), s.probability),
        perplexity=perplexity,
        alarms=_alarms(ess, sums, s.weighted),
    )


def _over(total: float, n: float) -> float:
    return float(total / n) if n else math.nan


def _mean(x: np.ndarray) -> float:
    return float(x.mean()) if len(x) else math.nan


def _sequence_ess(log_weight: np.ndarray, times: np.ndarray) -> Ess:
    value = float(estimators.ess(log_weight))
    low, high = estimators.ess_interval(log_weight, times)
    return _ess("sequence", value, len(log_weight), low, high, estimators.pareto_k(log_weight))


def _token_ess(sums: dict, top: np.ndarray, times: np.ndarray) -> Ess:
    n, w, ww = sums["n"], sums["w"], sums["ww"]
    tokens = int(n.sum())
    alive = tokens and ww.sum() > 0 and np.isfinite(ww.sum())
    value = float(w.sum() ** 2 / ww.sum() / tokens) if alive else math.nan
    low, high = estimators.bootstrap_ess(times, n, w, ww) if alive else (math.nan, math.nan)
    return _ess("token", value, tokens, low, high, estimators.pareto_k(top, tokens))


def _ess(unit: str, value: float, n: int, low: float, high: float, k: float) -> Ess:
    renyi2 = -math.log(value) if value > 0 else math.nan
    return Ess(unit, value, n, low, high, k, estimators.pareto_k_limit(n), renyi2, 1 / value - 1 if value else math.nan)


def _applied(sums: dict, unit: str) -> Applied | None:
    if not unit:
        return None
    n, tokens = sums["units"].sum(), sums["n"].sum()
    first, second = sums["a"].sum(), sums["aa"].sum()
    return Applied(
        unit=unit,
        ess=float(first**2 / second / n) if second > 0 else math.nan,
        n=int(n),
        mean=_over(first, sums["live"].sum()),
        largest=float(sums["largest"].max()) if len(sums["largest"]) else math.nan,
        rejected_fraction=1 - _over(sums["kept"].sum(), tokens),
    )


def _tails(sums: dict, top: np.ndarray, tokens: float, shift: float) -> Tails:
    one, two, three, four = (_over(sums[k].sum(), tokens) for k in ("t", "tt", "ttt", "tttt"))
    variance = two - one**2
    fourth = four - 4 * one * three + 6 * one**2 * two - 3 * one**4
    largest = np.sort(top)[::-1][: math.ceil(0.01 * tokens)]
    return Tails(
        top_share_token=_over(float(np.exp(largest - shift).sum()), float(sums["w"].sum())),
        top_share_sequence=estimators.top_share(sums["t"]),
        kurtosis=fourth / variance**2 - 3 if variance > 0 else math.nan,
        smallest_ratio=float(np.exp(sums["low"].min())) if tokens else math.nan,
        largest_ratio=float(np.exp(sums["high"].max())) if tokens else math.nan,
        multiplicative=_over(sums["multiplicative"].sum(), tokens),
        largest_response_geometric=float(np.abs(sums["t"] / sums["n"]).max()) if tokens else math.nan,
    )


def _by_octave(position: np.ndarray) -> tuple[tuple[float, ...], np.ndarray]:
    """Positions 0, 1, 2-3, 4-7, ...: edges and sums."""
    width = position.shape[1]
    edges = [0, *(2**k for k in range(max(width - 1, 0).bit_length()))]
    return tuple(float(e) for e in edges), np.add.reduceat(position, edges, axis=1) if width else np.zeros((3, 1))


def _profile(edges: tuple[float, ...], sums: np.ndarray) -> Profile:
    n, first, second = sums
    mean, square = (np.divide(x, n, out=np.full(len(n), np.nan), where=n > 0) for x in (first, second))
    return Profile(edges, tuple(int(x) for x in n), tuple(mean.tolist()), tuple(square.tolist()))


def _alarms(ess: dict[str, Ess], sums: dict, weighted: str) -> tuple[str, ...]:
    found = []
    if not sums["n"].sum():
        return ("the mask counts no token",)
    if weighted and not sums["kept"].sum():
        found.append("every token is rejected: rejected_fraction 1")
    for name, one in ess.items():
        if one.raw < 0.5:
            found.append(f"{name} ESS is {one.raw:.3g} of n = {one.n}, below 1/2")
        if one.pareto_k > one.pareto_k_limit:
            found.append(f"{name} Pareto k is {one.pareto_k:.2f}, above {one.pareto_k_limit:.2f}: ESS is flattered")
    if not np.isfinite(sums["t"]).all():
        found.append("the trainer gives probability 0 to a drawn token")
    return tuple(found)
