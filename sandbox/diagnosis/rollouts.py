"""The canonical rollout table in memory, and the rows and tokens of a dump that must not be used, each with its reason.

A dump is read in pieces (`Table`, columns as they stood) and every piece is checked (`refusals`) into a `Chunk`:
the rows that can be used, as ragged responses with flat tokens, and what was left out. Nothing is repaired and nothing
guessed: a row is kept whole, kept without some of its tokens (their mask is then False), or refused. Of every table,
rows kept + rows refused = rows read.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from itertools import chain
from typing import Any

import numpy as np

MISSING = -1  # a version that the dump does not say

# Why a row or a token is left out. The first nine are also finding codes of the diagnosis.
REASONS = {
    "ids_differ": "the trainer's token ids are not the sampler's; the common prefix is kept",
    "lengths_differ": "columns of one row have different lengths",
    "nonfinite": "nan in a counted token, or a sampler log-probability of -inf for a token that was drawn",
    "positive_logprob": "a log-probability above 0",
    "placeholder": "a value that stands for none: 0.0 where the other engine disagrees, 1, -9999",
    "observation_tokens": "a run of 0.0 inside the response where the trainer disagrees: text that nobody sampled",
    "negative_lag": "the sampler's version is newer than the trainer's",
    "duplicate": "the same step, epoch, prompt and sample stood before",
    "missing_version": "a version that is not a whole number",
    "missing_logprob": "no log-probability of one of the engines",
    "not_a_mask": "a mask with values other than 0 and 1: weights; what is not 0 counts",
    "mixed_schema": "the row has other columns or types than the format says",
    "unreadable_row": "the row cannot be parsed",
    "truncated_file": "the file ends inside a row, or is not whole",
    "unsafe_pickle": "the file could run code when it is opened",
}

LOGPS = ("logp_rollout", "logp_sync", "logp_train", "logp_old")
EXTRA = ("entropy", "weight")  # a number a token, no reason to refuse one
RAGGED = (*LOGPS, *EXTRA, "mask", "token_ids", "trainer_token_ids")  # and version_rollout, also one number a row
TOPS = ("top_rollout", "top_train")  # lists of numbers a token
SCALARS = ("version_train", "step", "reward", "advantage", "temperature", "top_p", "top_k", "rank", "epoch", "seconds")
NAMES = ("prompt_id", "sample_id")
COLUMNS = (*RAGGED, *TOPS, "version_rollout", *SCALARS, *NAMES)


@dataclass(frozen=True, eq=False)
class Rollouts:
    """n responses of m tokens in all; token i of response r stands at `starts[r] + i` of every flat array.

    Args:
        starts: first token of each response, and m. int64 (n + 1,)
        mask: True where a token counts; anything may stand in the other places of the flat arrays. bool (m,)
        logp_rollout, logp_train: log q as the sampler reported it, log pi of the trainer at `version_train`, nats. (m,)
        version_rollout: weight version that drew each token; MISSING where the dump does not say. int64 (m,)
        version_train: weight version that consumes the response; MISSING where the dump does not say. int64 (n,)
        step: training step; -1 where the dump does not say. int64 (n,)
        reward, advantage: of the response; nan where the dump does not say. (n,)
        prompt_id, sample_id: as text; a response without a sample_id is named by file and row. n strings each
        logp_sync: log mu, the trainer at the sampler's weights; nan in responses without; None where none has it. (m,)
        logp_old: what the framework calls old or prev; likewise. (m,)
        token_ids: drawn tokens, -1 where missing; None where the dump has none. int64 (m,)
        entropy, weight: of the sampler's or trainer's distribution, nats; what the loss of the token was multiplied by;
            nan where unknown. (m,)
        top_rollout, top_train: log-probabilities of the same k tokens at each place, by either engine; the whole
            vocabulary, or as many as there are; None where the dump has none. (m, k)
        temperature, top_p, top_k, rank, epoch, seconds: of the response; nan where the dump does not say. (n,)
    """

    starts: np.ndarray
    mask: np.ndarray
    logp_rollout: np.ndarray
    logp_train: np.ndarray
    version_rollout: np.ndarray
    version_train: np.ndarray
    step: np.ndarray
    reward: np.ndarray
    advantage: np.ndarray
    prompt_id: np.ndarray
    sample_id: np.ndarray
    logp_sync: np.ndarray | None
    logp_old: np.ndarray | None
    token_ids: np.ndarray | None
    entropy: np.ndarray | None
    weight: np.ndarray | None
    top_rollout: np.ndarray | None
    top_train: np.ndarray | None
    temperature: np.ndarray
    top_p: np.ndarray
    top_k: np.ndarray
    rank: np.ndarray
    epoch: np.ndarray
    seconds: np.ndarray

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each response, counted or not. int64 (n,)"""
        return np.diff(self.starts)

    @property
    def row(self) -> np.ndarray:
        """Which response each token belongs to. int64 (m,)"""
        return np.repeat(np.arange(len(self.starts) - 1), self.lengths)

    def take(self, rows: np.ndarray) -> "Rollouts":
        """Those responses alone, in that order: an integer or boolean array over the n responses."""
        rows = np.arange(len(self.starts) - 1)[rows]
        lengths = self.lengths[rows]
        index = _places(self.starts[rows], lengths)
        values: dict[str, Any] = {"starts": _starts(lengths)}
        for f in fields(self)[1:]:
            value = getattr(self, f.name)
            flat = f.name in (*LOGPS, *EXTRA, *TOPS, "mask", "version_rollout", "token_ids")
            values[f.name] = None if value is None else value[index if flat else rows]
        return Rollouts(**values)


@dataclass(frozen=True)
class Refused:
    """A row, or some of its tokens, left out.

    Args:
        sample_id: of the row; file and row where it has none.
        reason: one of REASONS.
        tokens: how many of its counted tokens are left out; 0 where that was not known.
        whole: whether the row is left out; else the rest of it is in use.
        detail: what exactly was seen.
    """

    sample_id: str
    reason: str
    tokens: int = 0
    whole: bool = True
    detail: str = ""


@dataclass(frozen=True)
class Chunk:
    """Rows in use, rows and tokens left out, and how many rows were read: rows in use + whole rows refused."""

    rollouts: Rollouts
    refused: list[Refused]
    n_rows: int


@dataclass(frozen=True, eq=False)
class Ragged:
    """One list a row: `flat` values end to end (m,), `lengths` (n,), -1 for no list, and where an element is null."""

    flat: np.ndarray
    lengths: np.ndarray
    null: np.ndarray | None = None

    @staticmethod
    def of(rows: Sequence[Any]) -> "Ragged":
        """From lists of numbers and None, or arrays of float64; None is a row without a list."""
        lengths = np.array([-1 if row is None else len(row) for row in rows], np.int64)
        values = [row for row in rows if row is not None]
        total = int(np.maximum(lengths, 0).sum())
        if values and isinstance(values[0], np.ndarray):
            return Ragged(np.concatenate(values), lengths)
        flat = np.fromiter(chain.from_iterable(values), float, total)  # None becomes nan
        if not np.isnan(flat).any():
            return Ragged(flat, lengths)
        return Ragged(flat, lengths, np.fromiter((x is None for x in chain.from_iterable(values)), bool, total))

    @property
    def starts(self) -> np.ndarray:
        return _starts(np.maximum(self.lengths, 0))

    def take(self, rows: np.ndarray, lengths: np.ndarray) -> "Ragged":
        """The first `lengths` values of those rows; nan in the rows that have no list."""
        if np.array_equal(rows, np.arange(len(self.lengths))) and np.array_equal(lengths, self.lengths):
            return self
        absent = self.lengths[rows] < 0
        index = _places(self.starts[:-1][rows], lengths)
        if absent.any():
            index[np.repeat(absent, lengths)] = len(self.flat)
        null = None if self.null is None else np.append(self.null, False)[index]
        return Ragged(np.append(self.flat, np.nan)[index] if absent.any() else self.flat[index], lengths, null)

    def or_else(self, other: "Ragged") -> "Ragged":
        """This row's list, or the other's where there is none."""
        if not (self.lengths < 0).any():
            return self
        lengths = np.where(self.lengths < 0, other.lengths, self.lengths)
        starts = np.where(self.lengths < 0, len(self.flat) + other.starts[:-1], self.starts[:-1])
        index = _places(starts, np.maximum(lengths, 0))
        both = [r.null if r.null is not None else np.zeros(len(r.flat), bool) for r in (self, other)]
        return Ragged(np.append(self.flat, other.flat)[index], lengths, np.append(*both)[index])


@dataclass(frozen=True, eq=False)
class Table:
    """A piece of a dump before it is checked; a column that the dump lacks is left out.

    Args:
        source: the file, as messages name it.
        rows: position of each row in the file. int (n,)
        ragged: columns of lists by their canonical name; lists of lists stand end to end.
        scalars: columns of numbers, nan where null. float64 (n,)
        names: prompt_id and sample_id. n values each, None where null
        refused: rows that could not even be parsed; they are not among the n.
    """

    source: str
    rows: np.ndarray
    ragged: dict[str, Ragged]
    scalars: dict[str, np.ndarray]
    names: dict[str, Sequence[Any]]
    refused: list[Refused] = field(default_factory=list)

    def name(self, row: Any) -> str:
        """What messages and `sample_id` call a row of the table."""
        given = self.names["sample_id"][row] if "sample_id" in self.names else None
        return f"{self.source}:{self.rows[row] + 1}" if given is None else str(given)


def _starts(lengths: np.ndarray) -> np.ndarray:
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths, dtype=np.int64)])


def _places(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Flat places of the first `lengths` values of rows that begin at `starts`, row after row."""
    new = _starts(lengths)
    return np.repeat(starts - new[:-1], lengths) + np.arange(new[-1])
