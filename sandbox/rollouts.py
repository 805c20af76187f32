"""The canonical rollout table in memory: rows checked one by one, refused with a reason where they cannot be trusted.

A row is a mapping with the columns of `COLUMNS` (a list or array a token where the name is in `PER_TOKEN`). A null
token stands as `MISSING`; nan is garbage. Rows of lists, of Parquet slices and of JSON lines all pass `collect`.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from sandbox.batch import LOGP_TOLERANCE
from sandbox.errors import BadInput

MISSING = -9999.0  # what SkyRL pads with; nulls are read as this, so that they stay apart from nan
FAR_BELOW = -0.5  # nats; a log-probability of exactly 0.0 is a placeholder where the other engine is below this
LOGPS = ("logp_rollout", "logp_train", "logp_sync", "logp_old")
PER_TOKEN = (*LOGPS, "mask", "token_ids", "trainer_token_ids")
PER_ROW = ("step", "version_train", "reward", "advantage", "temperature", "top_p", "top_k", "rank", "epoch", "seconds")
COLUMNS = (*PER_TOKEN, *PER_ROW, "version_rollout", "weight", "prompt_id", "sample_id")


@dataclass(frozen=True)
class Refused:
    """A row that is not analysed (or, with tokens > 0, that many of its tokens) and why: a finding code, in words."""

    sample_id: str
    code: str
    reason: str
    tokens: int = 0


@dataclass(frozen=True, eq=False)
class Rollouts:
    """n responses, their tokens end to end: response i has tokens starts[i] to starts[i + 1].

    mask: True where a token counts and is valid; log-probabilities are 0 elsewhere. bool (N,)
    logp_rollout, logp_train: log q and log pi, nats. (N,)
    logp_sync, logp_old: log mu and the framework's "old", nan where a row has none; None without any. (N,)
    version_rollout: weight version that drew the token, nan where unknown. (N,)
    weight: what the trainer multiplied the token's loss by, nan where unknown; None without any. (N,)
    rows: a column each of PER_ROW, nan where unknown. (n,)
    prompt, sample: ids as text.
    notes: how many rows have a property that is no reason to refuse them.
    """

    starts: np.ndarray
    mask: np.ndarray
    logp_rollout: np.ndarray
    logp_train: np.ndarray
    logp_sync: np.ndarray | None
    logp_old: np.ndarray | None
    version_rollout: np.ndarray
    weight: np.ndarray | None
    rows: dict[str, np.ndarray]
    prompt: tuple[str, ...]
    sample: tuple[str, ...]
    refused: tuple[Refused, ...]
    notes: dict[str, int]

    @property
    def n(self) -> int:
        return len(self.starts) - 1

    @cached_property
    def group(self) -> np.ndarray:
        """Prompt of each response, numbered: the unit of a bootstrap. int (n,)"""
        return np.unique(np.asarray(self.prompt), return_inverse=True)[1]

    @property
    def row(self) -> np.ndarray:
        """Response of each token. int (N,)"""
        return np.repeat(np.arange(self.n), np.diff(self.starts))


class _Refuse(Exception):
    def __init__(self, code: str, reason: str):
        super().__init__(reason)
        self.code = code


@dataclass
class _Row:
    values: dict[str, np.ndarray]
    mask: np.ndarray
    version: np.ndarray
    dropped: list[tuple[str, str, int]] = field(default_factory=list)
    weighted: bool = False


def collect(rows: Iterable[Mapping[str, Any] | Refused], lag: int | None = None) -> Rollouts:
    """Check every row and lay the good ones end to end.

    Args:
        rows: of the canonical table; a reader passes on what it could not read at all as a `Refused`.
        lag: the user's word that every token is this many versions old: 0 makes `logp_old` (or `logp_train`) the
            trainer at the sampler's weights.
    """
    good: list[_Row] = []
    single: list[dict[str, float]] = []
    names: list[tuple[str, str]] = []
    refused: list[Refused] = []
    notes: Counter[str] = Counter()
    seen: set[tuple] = set()
    for number, row in enumerate(rows):
        if isinstance(row, Refused):
            refused.append(row)
            continue
        name = f"row {number}" if row.get("sample_id") is None else str(row["sample_id"])
        try:
            one = _check(row)
            scalars = {column: _number(row, column) for column in PER_ROW}
            if lag is not None:
                one.version[:], scalars["version_train"] = 0.0, float(lag)
            _check_versions(one, scalars["version_train"])
            if row.get("sample_id") is not None:
                key = (*(str(row.get(c)) for c in ("step", "epoch", "rank", "prompt_id", "sample_id")),)
                if key in seen:
                    raise _Refuse("duplicate", "a row of this step, prompt and sample id has been read already")
                seen.add(key)
        except _Refuse as why:
            refused.append(Refused(name, why.code, str(why)))
            continue
        refused += [Refused(name, code, reason, tokens) for code, reason, tokens in one.dropped]
        notes["weights_as_mask"] += one.weighted
        good.append(one)
        single.append(scalars)
        names.append((str(row.get("prompt_id", number)), name))
    lengths = [len(one.mask) for one in good]

    def flat(name: str) -> np.ndarray:
        """Taken out of the rows, so that a column is not held twice."""
        parts = [one.values.pop(name) if name in one.values else np.full(len(one.mask), math.nan) for one in good]
        return np.concatenate([np.zeros(0), *parts])

    def optional(name: str) -> np.ndarray | None:
        return flat(name) if any(name in one.values for one in good) else None

    return Rollouts(
        np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        np.concatenate([np.zeros(0, bool), *(one.mask for one in good)]),
        flat("logp_rollout"),
        flat("logp_train"),
        optional("logp_sync"),
        optional("logp_old"),
        np.concatenate([np.zeros(0), *(one.version for one in good)]),
        optional("weight"),
        {column: np.array([s[column] for s in single], float) for column in PER_ROW},
        tuple(prompt for prompt, _ in names),
        tuple(sample for _, sample in names),
        tuple(refused),
        dict(notes),
    )


def _vector(row: Mapping[str, Any], name: str) -> np.ndarray | None:
    value = row.get(name)
    if value is None:
        return None
    if not isinstance(value, list | tuple | np.ndarray):
        raise _Refuse("malformed", f"{name} is {type(value).__name__}, expected a list of numbers")
    try:
        vector = np.array(value) if len(value) else np.zeros(0)
        if vector.dtype.kind == "O":  # nulls, or things that are no numbers
            if any(isinstance(x, str | bytes | list | dict | tuple) for x in vector):
                raise _Refuse("malformed", f"{name} has an entry that is not a number")
            vector = np.array([MISSING if x is None else x for x in vector], dtype=np.float64)
        if vector.dtype.kind not in "fiub":
            raise _Refuse("malformed", f"{name} has an entry that is not a number")
        vector = vector.astype(np.float64)
    except (ValueError, TypeError, OverflowError) as error:
        raise _Refuse("malformed", f"{name} has an entry that is not a number") from error
    if vector.ndim != 1:
        raise _Refuse("malformed", f"{name} has {vector.ndim} dimensions, expected a list of numbers")
    return vector


def _number(row: Mapping[str, Any], name: str) -> float:
    value = row.get(name)
    if value is None:
        return math.nan
    if isinstance(value, list | tuple | np.ndarray) and name == "advantage" and len(value):
        value = next((x for x in value if x), 0.0)  # one a token: prompts and padding carry 0
    if isinstance(value, bool | np.bool_ | int | float | np.integer | np.floating):
        try:
            return float(value)
        except OverflowError as error:
            raise _Refuse("malformed", f"{name} is too large") from error
    raise _Refuse("malformed", f"{name} is {type(value).__name__}, expected a number")


def _check(row: Mapping[str, Any]) -> _Row:
    """Log-probabilities and mask of one row, or `_Refuse`."""
    found = {name: _vector(row, name) for name in PER_TOKEN}
    values = {name: x for name in LOGPS if (x := found[name]) is not None}
    for name in ("logp_rollout", "logp_train"):
        if name not in values:
            raise _Refuse("mixed_schema", f"no {name}")
    dropped: list[tuple[str, str, int]] = []
    ids, theirs = found["token_ids"], found["trainer_token_ids"]
    n = len(values["logp_rollout"])
    if ids is not None and len(ids) != n:
        raise _Refuse("lengths_differ", f"{len(ids)} token_ids, {n} logp_rollout")
    mask = found["mask"]
    if ids is not None and theirs is not None and not np.array_equal(ids, theirs):
        if len(theirs) != len(values["logp_train"]):
            raise _Refuse("lengths_differ", f"{len(theirs)} trainer_token_ids, {len(values['logp_train'])} logp_train")
        short = min(len(ids), len(theirs))
        other = np.flatnonzero(ids[:short] != theirs[:short])
        prefix = int(other[0]) if len(other) else short
        if prefix == 0:
            raise _Refuse("ids_differ", "sampler's and trainer's ids differ from the first token on")
        dropped.append(("ids_differ", f"ids differ from token {prefix} on: the prefix before is kept", n - prefix))
        values = {name: x[:prefix] for name, x in values.items()}
        mask = None if mask is None else mask[:prefix]
        n = prefix
    for name, x in (*values.items(), ("mask", mask)):
        if x is not None and len(x) != n:
            raise _Refuse("lengths_differ", f"{len(x)} {name}, {n} logp_rollout")
    counted = np.ones(n, bool) if mask is None else (mask != 0) & (mask != MISSING) & ~np.isnan(mask)
    weighted = mask is not None and bool((counted & (mask != 1)).any())
    if not counted.any():
        raise _Refuse("empty", "no token counts: the row is no response")
    valid = counted.copy()
    q, train = values["logp_rollout"], values["logp_train"]
    zero = (q == 0) & (train < FAR_BELOW) | (train == 0) & (q < FAR_BELOW)
    greedy = row.get("temperature") == 0 or row.get("top_k") == 1
    observed = np.zeros(n, bool)
    if greedy:
        zero[:] = False
    else:
        zero &= counted & (train > MISSING) & (q > MISSING)
        run = zero & (np.append(zero[1:], False) | np.append(False, zero[:-1]))
        if run.any() and not run.all():
            observed = run
    missing = np.zeros(n, bool)
    for x in values.values():
        missing |= counted & ((x <= MISSING) & np.isfinite(x) | (x == 1.0))
    for code, bad, reason in (
        ("observation_tokens", observed, "a run of log-probs of 0.0 where the other engine is far below: not sampled"),
        ("placeholder", zero & ~observed, "a log-prob of exactly 0.0 where the other engine is far below"),
        ("placeholder", missing, "a placeholder (null, -9999 or 1) stands for a log-prob"),
    ):
        if bad.any():
            dropped.append((code, reason, int(bad.sum())))
            valid &= ~bad
    for name, x in values.items():
        if np.isnan(x[valid]).any():
            raise _Refuse("nonfinite", f"{name} has a nan: the logits of the whole row are in doubt")
        if name == "logp_rollout" and np.isneginf(x[valid]).any():
            raise _Refuse("nonfinite", "logp_rollout is -inf: a token of probability 0 cannot have been sampled")
        if (x[valid] > LOGP_TOLERANCE).any():
            raise _Refuse("positive_logprob", f"{name} has a log-prob of {x[valid].max():.3g} > 0")
    if not valid.any():
        raise _Refuse(dropped[-1][0], dropped[-1][1] + " at every token")
    values = {name: np.where(valid, x, 0.0) for name, x in values.items()}
    weight = row.get("weight")
    if weight is not None:
        w = np.full(n, _number(row, "weight")) if not isinstance(weight, list | np.ndarray) else _vector(row, "weight")
        if w is None or len(w) != n:
            raise _Refuse("lengths_differ", f"{0 if w is None else len(w)} weight, {n} logp_rollout")
        values["weight"] = np.where(w == MISSING, math.nan, w)
    version = row.get("version_rollout")
    if isinstance(version, list | tuple | np.ndarray):
        versions = _vector(row, "version_rollout")
        cut = n if dropped and dropped[0][0] == "ids_differ" else None
        versions = np.zeros(0) if versions is None else versions[:cut]
        if len(versions) != n:
            raise _Refuse("lengths_differ", f"{len(versions)} version_rollout, {n} logp_rollout")
        versions = np.where(versions == MISSING, math.nan, versions)
    else:
        versions = np.full(n, _number(row, "version_rollout"))
    versions[versions < 0] = math.nan  # -1 stands for "unknown" in several frameworks
    return _Row(values, valid, versions, dropped, weighted)


def _check_versions(row: _Row, consumer: float) -> None:
    if (row.version[row.mask] > consumer).any():
        raise _Refuse("negative_lag", f"drawn by version {row.version[row.mask].max():g}, consumed at {consumer:g}")


def need(rollouts: Rollouts) -> None:
    """Raises BadInput where no row is left to analyse, naming the first reason."""
    if not rollouts.n:
        first = rollouts.refused[0] if rollouts.refused else None
        raise BadInput(
            f"no row can be analysed: {first.sample_id}: {first.reason}" if first else "the dump has no rows"
        )
