"""What a diagnosis remembers of a dump: sums of every response, sums by lag, and the tokens of some responses.

Chunks are added one by one and forgotten. Everything that must be exact (mean squares, KL, sequence weights) comes from
the sums; what needs single tokens (regressions, medians, tails, corrections) from the sample, which is the whole dump
up to half a million tokens. Log ratios are trainer minus sampler, nats.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import numpy as np

from sandbox.corrections import ratios
from sandbox.diagnosis.rollouts import MISSING, Chunk, Refused, Rollouts

SAMPLE_TOKENS = 2**19
TOP_TOKENS = 20_000
LAGS = 4096  # above it a chunk's lags are sorted instead of counted
ALIVE = 700.0  # nats; e^t overflows beyond

# Per response: counted tokens, sums over them of t, t^2, k3, e^t, e^2t, and of d, g and their products over
# tokens where logp_sync is known; tokens to which the trainer gives probability 0 (in no sum but that of t). k1 is
# minus the sum of t without those.
SUMS = ("n", "t", "k1", "tt", "k3", "w", "ww", "zeros", "synced", "d", "g", "dd", "gg", "dg")
SCALARS = ("step", "reward", "advantage", "rank", "temperature", "top_p", "top_k")


@dataclass(frozen=True)
class Finding:
    """What is wrong, or worth knowing, and what to change.

    Args:
        code: see DESIGN's list; other programs rely on it.
        severity: an error makes the log-probabilities mean something else than they should: no statistics before it is
            mended. A warning changes what the numbers say; an info is for completeness.
        evidence: measured numbers, their names holding unit and n.
    """

    code: str
    severity: Literal["error", "warning", "info"]
    message: str
    evidence: dict[str, Any]


@dataclass(frozen=True, eq=False)
class Sample:
    """Counted tokens of some responses, in order. m tokens.

    Args:
        response: which row of `Evidence.responses` each belongs to, ascending. int (m,)
        position: place in its response, uncounted tokens included. int (m,)
        rollout, train: log q, log pi, nats; `train` may be -inf. (m,)
        sync, old: log mu and what the framework calls old; nan where unknown. (m,)
        lag: version_train - version_rollout of each, MISSING where unknown. int (m,)
        token: its id, -1 where unknown. int (m,)
        entropy, weight: see `Rollouts`; nan where unknown. (m,)
    """

    response: np.ndarray
    position: np.ndarray
    rollout: np.ndarray
    train: np.ndarray
    sync: np.ndarray
    old: np.ndarray
    lag: np.ndarray
    token: np.ndarray
    entropy: np.ndarray
    weight: np.ndarray

    def where(self, keep: np.ndarray) -> "Sample":
        return Sample(*(getattr(self, name)[keep] for name in self.__dataclass_fields__))

    def __len__(self) -> int:
        return len(self.rollout)


@dataclass(frozen=True, eq=False)
class Evidence:
    """A whole dump, reduced. n responses with a counted token.

    Args:
        responses: SUMS, SCALARS, and prompt (int code), version_train, lag (of all its tokens; MISSING where they
            differ or one is unknown), mixed (drawn by more than one version), lag_sum and lag_known (over tokens whose
            lag is known), length (uncounted tokens included). (n,)
        by_lag: lag -> tokens, sum of t^2; MISSING is a key.
        empty: lengths of the responses that are masked throughout.
        tops: log-probabilities of several tokens at one place, sampler's and trainer's, of the first TOP_TOKENS places
            that have them. (places, k) both
    """

    responses: dict[str, np.ndarray]
    by_lag: dict[int, tuple[int, float]]
    sample: Sample
    refused: list[Refused]
    n_rows: int
    empty: np.ndarray
    tops: tuple[np.ndarray, np.ndarray] | None = None

    @property
    def n_tokens(self) -> int:
        return int(self.responses["n"].sum())

    def of(self, name: str) -> np.ndarray:
        """A scalar of the response, for each token of the sample."""
        return self.responses[name][self.sample.response]


def collect(chunks: Iterable[Chunk], sample_tokens: int = SAMPLE_TOKENS) -> Evidence:
    """Reduce a dump, a chunk at a time."""
    state = _State(sample_tokens)
    for chunk in chunks:
        state.add(chunk)
    return state.result()


@dataclass
class _State:
    """The reduction under way; `stride` is a power of two: one response in so many is kept in the sample."""

    sample_tokens: int
    stride: int = 1
    count: int = 0
    n_rows: int = 0
    kept: int = 0
    pieces: list[Sample] = field(default_factory=list)
    tables: list[dict[str, np.ndarray]] = field(default_factory=list)
    empty: list[np.ndarray] = field(default_factory=list)
    refused: list[Refused] = field(default_factory=list)
    prompts: dict[str, int] = field(default_factory=dict)
    by_lag: dict[int, tuple[int, float]] = field(default_factory=dict)
    tops: list[tuple[np.ndarray, np.ndarray]] = field(default_factory=list)

    def add(self, chunk: Chunk) -> None:
        self.n_rows += chunk.n_rows
        self.refused += chunk.refused
        rollouts = chunk.rollouts
        self._keep_tops(rollouts)
        flat = _flat(rollouts, self.count)
        lengths = rollouts.lengths
        n = np.bincount(flat.response - self.count, minlength=len(lengths))
        some = n > 0
        self.empty.append(lengths[~some])
        if not some.any():
            return
        # responses without a counted token are no responses: number the others without gaps
        number = self.count + np.cumsum(some) - 1
        if not some.all():
            flat = Sample(number[flat.response - self.count], *(getattr(flat, f) for f in list(FLAT)[1:]))
        table, tt = _sums(flat, n[some])
        for name in SCALARS:
            value = np.asarray(getattr(rollouts, name), float)[some]
            table[name] = np.where(np.abs(value) < 1e100, value, np.nan)  # what has no square is no reward
        table["version_train"], table["length"] = rollouts.version_train[some], lengths[some]
        codes = [self.prompts.setdefault(name, len(self.prompts)) for name in rollouts.prompt_id[some].tolist()]
        table["prompt"] = np.array(codes, np.int64)
        self.tables.append(table)
        self._count_lags(flat.lag, tt)
        self._keep(flat)
        self.count += int(some.sum())

    def _count_lags(self, lag: np.ndarray, tt: np.ndarray) -> None:
        if lag.max() < LAGS:
            places, index = np.arange(MISSING, lag.max() + 1), lag - MISSING
        else:
            places, index = np.unique(lag, return_inverse=True)
        tokens, squares = np.bincount(index), np.bincount(index, tt)
        for i in np.flatnonzero(tokens):
            old = self.by_lag.get(int(places[i]), (0, 0.0))
            self.by_lag[int(places[i])] = (old[0] + int(tokens[i]), old[1] + float(squares[i]))

    def _keep(self, flat: Sample) -> None:
        piece = flat.where(_chosen(flat.response, self.stride)) if self.stride > 1 else flat
        self.pieces.append(piece)
        self.kept += len(piece)
        while self.kept > self.sample_tokens:
            self.stride *= 2
            self.pieces = [piece.where(_chosen(piece.response, self.stride)) for piece in self.pieces]
            self.kept = sum(map(len, self.pieces))

    def _keep_tops(self, rollouts: Rollouts) -> None:
        room = TOP_TOKENS - sum(len(q) for q, _ in self.tops)
        if rollouts.top_rollout is None or rollouts.top_train is None or room <= 0:
            return
        both = rollouts.top_rollout, rollouts.top_train
        if self.tops and self.tops[0][0].shape[1] != both[0].shape[1]:
            return
        some = np.flatnonzero(rollouts.mask & np.isfinite(both[0]).all(1) & np.isfinite(both[1]).all(1))[:room]
        self.tops.append((both[0][some], both[1][some]))

    def result(self) -> Evidence:
        pieces = self.pieces or [Sample(*(np.zeros(0, kind) for kind in FLAT.values()))]
        sample = Sample(*(np.concatenate([getattr(piece, name) for piece in pieces]) for name in FLAT))
        names = list(self.tables[0]) if self.tables else [*SUMS, *SCALARS, *RESPONSE]
        table = {name: np.concatenate([t[name] for t in self.tables] or [np.zeros(0)]) for name in names}
        empty = np.concatenate(self.empty) if self.empty else np.zeros(0, np.int64)
        tops = None
        if self.tops:
            tops = np.concatenate([q for q, _ in self.tops]), np.concatenate([p for _, p in self.tops])
        return Evidence(table, self.by_lag, sample, self.refused, self.n_rows, empty, tops)


FLAT = {"response": int, "position": int, "rollout": float, "train": float, "sync": float, "old": float}
FLAT |= {"lag": int, "token": int, "entropy": float, "weight": float}
RESPONSE = ("prompt", "version_train", "lag", "mixed", "lag_sum", "lag_known", "length")


def _flat(rollouts: Rollouts, first: int) -> Sample:
    """The counted tokens of a chunk, its responses numbered from `first`."""
    row = rollouts.row
    trained = rollouts.version_train[row]
    lag = np.where((trained == MISSING) | (rollouts.version_rollout == MISSING), MISSING, trained)
    lag = np.where(lag == MISSING, MISSING, lag - rollouts.version_rollout)
    none = np.full(len(row), np.nan)
    optional = (rollouts.logp_sync, rollouts.logp_old, rollouts.entropy, rollouts.weight)
    sync, old, entropy, weight = (none if x is None else x for x in optional)
    position = np.arange(len(row)) - rollouts.starts[row]
    token = np.full(len(row), -1) if rollouts.token_ids is None else rollouts.token_ids
    flat = Sample(
        row + first, position, rollouts.logp_rollout, rollouts.logp_train, sync, old, lag, token, entropy, weight
    )
    return flat if rollouts.mask.all() else flat.where(rollouts.mask)


def _sums(flat: Sample, n: np.ndarray) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """SUMS and the lags of each response, and t^2 of every token (0 where the trainer gives probability 0)."""
    starts = np.cumsum(n) - n

    def total(x: np.ndarray) -> np.ndarray:
        return np.add.reduceat(x, starts)

    alive = np.isfinite(flat.train)
    all_alive = alive.all()
    t = flat.train - flat.rollout
    finite = t if all_alive else np.where(alive, t, 0.0)
    tt = finite * finite
    expm1 = np.expm1(np.minimum(finite, ALIVE / 2))
    w = 1 + expm1 if all_alive else np.where(alive, 1 + expm1, 0.0)
    sums = {"n": n.astype(float), "t": total(t), "k1": -total(finite), "tt": total(tt), "k3": total(expm1 - finite)}
    sums |= {"w": total(w), "ww": total(w * w)}
    sums["zeros"] = np.zeros(len(n)) if all_alive else total((~alive).astype(float))
    known = ~np.isnan(flat.sync) & alive & np.isfinite(flat.sync)
    if known.any():
        d, g = flat.sync - flat.rollout, flat.train - flat.sync
        if not known.all():
            d, g = np.where(known, d, 0.0), np.where(known, g, 0.0)
        sums |= {"synced": total(known.astype(float)), "d": total(d), "g": total(g)}
        sums |= {"dd": total(d * d), "gg": total(g * g), "dg": total(d * g)}
    else:
        sums |= {name: np.zeros(len(n)) for name in SUMS[-6:]}
    has = flat.lag != MISSING
    lowest = np.minimum.reduceat(flat.lag, starts)
    highest = np.maximum.reduceat(flat.lag, starts)
    sums["lag"] = np.where(lowest == highest, lowest, MISSING)
    sums["mixed"] = np.minimum.reduceat(np.where(has, flat.lag, np.iinfo(int).max), starts) < highest
    sums["lag_sum"], sums["lag_known"] = total(np.where(has, flat.lag, 0)), total(has.astype(np.int64))
    return sums, tt


def _chosen(response: np.ndarray, stride: int) -> np.ndarray:
    """One response in `stride`, by a hash of its number: groups and ranks that take turns are met alike."""
    return (response.astype(np.uint64) * np.uint64(2654435761)) % np.uint64(2**32) < np.uint64(2**32 // stride)


@dataclass(frozen=True, eq=False)
class Reference:
    """Tokens whose trainer stands at the sampler's weights, as far as the dump has any: their log ratio is d.

    basis: "logp_sync"; "lag 0", the tokens that say so; "logp_train", all tokens, whose log ratio holds the lag too.
    """

    basis: Literal["logp_sync", "lag 0", "logp_train"]
    tokens: Sample
    trainer: np.ndarray

    @cached_property
    def d(self) -> np.ndarray:
        return self.trainer - self.tokens.rollout

    @cached_property
    def doubt(self) -> np.ndarray:
        """1 - p of each token by the less certain engine: an error e of a logit moves log p by about e (1 - p). (m,)"""
        return -np.expm1(np.minimum(np.minimum(self.tokens.rollout, self.trainer), 0.0))


def reference(evidence: Evidence, resynced: bool = True) -> Reference:
    """The best reference that the sample has: logp_sync, or else the tokens of lag 0.

    Args:
        resynced: whether logp_sync can be trusted to be at the sampler's weights.
    """
    sample = evidence.sample
    synced = np.isfinite(sample.sync) if resynced else np.zeros(len(sample), bool)
    at_zero = (sample.lag == 0) & np.isfinite(sample.train)
    if synced.any():
        tokens = sample.where(synced)
        return Reference("logp_sync", tokens, tokens.sync)
    if at_zero.any():
        tokens = sample.where(at_zero)
        return Reference("lag 0", tokens, tokens.train)
    tokens = sample.where(np.isfinite(sample.train))
    return Reference("logp_train", tokens, tokens.train)


def k3(t: np.ndarray) -> np.ndarray:
    """e^t - 1 - t of each token, an unbiased estimator of KL(q || p) per token. (m,)"""
    return ratios.ESTIMATORS["k3"](np.minimum(t, ALIVE))


def mean_and_error(tokens: Sample, values: np.ndarray) -> tuple[float, float]:
    """Mean over tokens, and its standard error with responses as clusters; (nan, nan) without a token."""
    if not len(values):
        return np.nan, np.nan
    mean = float(values.mean())
    sums = np.add.reduceat(values - mean, np.flatnonzero(np.diff(tokens.response, prepend=-1)))
    groups = len(sums)
    if groups < 2:  # one response: its tokens stand for themselves
        return mean, float(values.std() / np.sqrt(max(len(values) - 1, 1)))
    return mean, float(np.sqrt((sums**2).sum() * groups / (groups - 1)) / len(values))


def same_prefix(evidence: Evidence, tokens: Sample) -> np.ndarray:
    """Numbers that are equal for tokens drawn after the same prompt and the same counted tokens; int (m,)

    The first counted token of every response to a prompt, and the later ones as far as token ids are known and equal.
    """
    starts = np.flatnonzero(np.diff(tokens.response, prepend=-1))
    lengths = np.diff(np.append(starts, len(tokens)))
    place = np.arange(len(tokens)) - np.repeat(starts, lengths)
    with np.errstate(over="ignore"):  # a hash: a sum modulo 2^64 of what stood before
        mixed = (tokens.token.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
        mixed = (
            (mixed ^ (mixed >> np.uint64(29))) * (2 * place.astype(np.uint64) + np.uint64(1)) * np.uint64(0xBF58476D)
        )
        before = np.cumsum(mixed) - mixed
        before -= np.repeat(before[starts], lengths)
        before += evidence.responses["prompt"][tokens.response].astype(np.uint64) * np.uint64(0x94D049BB133111EB)
        before += evidence.responses["version_train"][tokens.response].astype(np.uint64) * np.uint64(0xD6E8FEB86659FD93)
    unknown = (tokens.token < 0) & (place > 0)
    cut = np.maximum.accumulate(np.where(unknown, np.arange(len(tokens)), -1)) >= np.repeat(starts, lengths)
    keys = np.unique(before, return_inverse=True)[1]
    return np.where(cut | unknown, keys.max(initial=0) + 1 + np.arange(len(tokens)), keys)
