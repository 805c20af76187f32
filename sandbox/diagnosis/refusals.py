"""Which rows and tokens of a dump must not be used: `check` turns a `Table` as read into a `Chunk` of usable rows.

A row that is wrong somewhere (nan, lengths, versions) is refused whole: what else is wrong with it is not known. Single
tokens without a value (null, placeholders) and everything from the first differing token id on are masked or cut. A
sampler's 0.0 is a placeholder only where the trainer disagrees: a token that was certain has log-probability 0.0 too.
"""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from sandbox.batch import LOGP_TOLERANCE
from sandbox.diagnosis.rollouts import EXTRA, LOGPS, MISSING, SCALARS, TOPS, Chunk, Ragged, Refused, Rollouts, Table

DISAGREES = 1.0  # nats; 0.0 says p = 1, so an engine below e^-1 was not asked about the same token
IMPOSSIBLE = -100.0  # nats; no drawn token had this: -9999 and the like stand for "no value"
WHOLE = 2.0**53  # beyond it a float does not hold every whole number


def check(table: Table, seen: set, lag: int | None = None) -> Chunk:
    """The rows of a table that can be used, and why the others cannot.

    `logp_old` also becomes `logp_sync` in rows without one whose versions are known and equal: old is then the trainer
    at the sampler's weights. It becomes `logp_train` where there is none: before the first update they are the same.

    Args:
        table: n rows.
        seen: keys of the rows met before, over all tables of a dump; added to.
        lag: the user's word for version_train - version_rollout of every row, in place of what the dump says.
    """
    columns = _completed(table)
    refused = list(table.refused)
    good = np.ones(len(table.rows), bool)
    for reason, bad, detail in _bad_rows(table, columns):
        refused += [Refused(table.name(i), reason, detail=detail) for i in np.flatnonzero(bad & good)]
        good &= ~bad
    for i in np.flatnonzero(good):
        key = _key(table, i)
        if key in seen:
            refused.append(Refused(table.name(i), "duplicate"))
            good[i] = False
        elif key:
            seen.add(key)
    rows = np.flatnonzero(good)
    rows, lengths, cut = _one_tokenisation(table, columns, rows)
    rollouts, refused_values = _bad_values(_rollouts(table, columns, rows, lengths, lag), columns, rows)
    return Chunk(rollouts, refused + cut + refused_values, len(table.rows) + len(table.refused))


def _completed(table: Table) -> dict[str, Ragged]:
    """The ragged columns, with those that everything else needs: both engines, mask, versions of the tokens."""
    n, columns = len(table.rows), dict(table.ragged)
    none = Ragged(np.zeros(0), np.full(n, -1))
    columns["logp_rollout"] = columns.get("logp_rollout", none)
    columns["logp_train"] = columns.get("logp_train", none).or_else(columns.get("logp_old", none))
    lengths = columns["logp_rollout"].lengths
    ones = Ragged(np.ones(np.maximum(lengths, 0).sum()), lengths)
    columns["mask"] = columns.get("mask", none).or_else(ones)
    return {name: c for name, c in columns.items() if (c.lengths >= 0).any() or name in ("logp_rollout", "logp_train")}


def _bad_rows(table: Table, columns: dict[str, Ragged]) -> Iterator[tuple[str, np.ndarray, str]]:
    """Reason, rows, detail of what is wrong before the values of tokens are looked at."""
    sampler, trainer = columns["logp_rollout"].lengths, columns["logp_train"].lengths
    yield "mixed_schema", (sampler < 0) & (trainer < 0), "no log-probabilities of either engine"
    yield "missing_logprob", sampler < 0, "no logp_rollout"
    yield "missing_logprob", trainer < 0, "neither logp_train nor logp_old"
    both_ids = np.ones(len(table.rows), bool)
    for name in ("token_ids", "trainer_token_ids"):
        both_ids &= columns[name].lengths >= 0 if name in columns else False
    yield "lengths_differ", (sampler != trainer) & ~both_ids, "logp_rollout and logp_train"
    width = _width(columns)
    for name, column in columns.items():
        wrong = column.lengths != (sampler if name in ("logp_rollout", "token_ids", "version_rollout") else trainer)
        if name == "mask":
            wrong &= column.lengths != sampler
        if name in TOPS:
            wrong = column.lengths != sampler * width
        yield "lengths_differ", wrong & (column.lengths >= 0), name
    versions = columns.get("version_rollout")
    if versions is not None:
        odd = np.flatnonzero(_not_whole(versions.flat))
        yield "missing_version", np.isin(np.arange(len(table.rows)), _rows_of(odd, versions.starts)), "version_rollout"
    for name in ("version_rollout", "version_train", "step"):
        if name in table.scalars:
            yield "missing_version" if name != "step" else "mixed_schema", _not_whole(table.scalars[name]), name


def _width(columns: dict[str, Ragged]) -> int:
    """How many log-probabilities a token has in `TOPS`, by most rows."""
    tops = [columns[name].lengths // np.maximum(columns["logp_rollout"].lengths, 1) for name in TOPS if name in columns]
    widths = np.concatenate(tops or [np.zeros(1, int)])
    return int(np.bincount(np.maximum(widths, 0)).argmax()) if len(widths) else 0


def _not_whole(values: np.ndarray) -> np.ndarray:
    return ~np.isnan(values) & ((np.abs(values) > WHOLE) | (values != np.floor(values)))


def _key(table: Table, row: int) -> tuple | None:
    """What no second row may share; None for a row that the dump does not name."""
    if "sample_id" not in table.names or table.names["sample_id"][row] is None:
        return None
    prompt = table.names["prompt_id"][row] if "prompt_id" in table.names else None
    numbers = [str(table.scalars[name][row]) for name in ("step", "epoch") if name in table.scalars]
    return (*numbers, str(prompt), str(table.names["sample_id"][row]))


def _one_tokenisation(table: Table, columns: dict[str, Ragged], rows: np.ndarray) -> tuple:
    """Rows, how many of their tokens both engines scored as the same token after the same ones, and what that cost."""
    longer = np.maximum(columns["logp_rollout"].lengths, columns["logp_train"].lengths)[rows]
    lengths = np.minimum(columns["logp_rollout"].lengths, columns["logp_train"].lengths)[rows]
    if "token_ids" not in columns or "trainer_token_ids" not in columns:
        return rows, lengths, []
    sampler, trainer = (columns[name].take(rows, lengths) for name in ("token_ids", "trainer_token_ids"))
    differs = np.flatnonzero((sampler.flat != trainer.flat) & ~np.isnan(sampler.flat) & ~np.isnan(trainer.flat))
    starts = np.concatenate([[0], np.cumsum(lengths)])
    which = _rows_of(differs, starts)
    first, place = np.unique(which, return_index=True)
    kept = lengths.copy()
    kept[first] = differs[place] - starts[first]
    cut = kept < longer
    refused = [
        Refused(
            table.name(rows[i]), "ids_differ", int(longer[i] - kept[i]), bool(kept[i] == 0), f"from token {kept[i]} on"
        )
        for i in np.flatnonzero(cut)
    ]
    stays = ~cut | (kept > 0)
    return rows[stays], kept[stays], refused


def _rollouts(
    table: Table, columns: dict[str, Ragged], rows: np.ndarray, lengths: np.ndarray, lag: int | None
) -> Rollouts:
    """The rows as they stand, nothing checked; mask is False on tokens without a log-probability."""

    def scalar(name: str) -> np.ndarray:
        return table.scalars[name][rows] if name in table.scalars else np.full(len(rows), np.nan)

    def whole(values: np.ndarray) -> np.ndarray:
        return np.where((values >= 0) & (values <= WHOLE), values, MISSING).astype(np.int64)

    plain = (*LOGPS, *EXTRA, "mask", "token_ids")
    flat = {name: columns[name].take(rows, lengths).flat for name in plain if name in columns}
    width, tops = _width(columns), {}
    for name in TOPS:
        if name in columns and width:
            tops[name] = columns[name].take(rows, lengths * width).flat.reshape(-1, width)
    step, trained = scalar("step"), whole(scalar("version_train"))
    if lag is not None:
        drawn = np.where(trained >= 0, trained, np.maximum(whole(step), 0))
        trained, drawn = drawn + lag, np.repeat(drawn, lengths)
    elif "version_rollout" in columns:
        drawn = whole(columns["version_rollout"].take(rows, lengths).flat)
        one = np.repeat(whole(scalar("version_rollout")), lengths)
        drawn = np.where(drawn == MISSING, one, drawn)
    else:
        drawn = np.repeat(whole(scalar("version_rollout")), lengths)
    logp_sync = flat.get("logp_sync")
    if "logp_old" in flat:
        absent = columns["logp_sync"].lengths[rows] < 0 if logp_sync is not None else np.ones(len(rows), bool)
        equal = (drawn == np.repeat(trained, lengths)) & (drawn != MISSING)
        now = np.repeat(absent & (_sums(~equal, lengths) == 0), lengths)
        if now.any():
            logp_sync = np.where(now, flat["logp_old"], np.nan if logp_sync is None else logp_sync)
    advantage = scalar("advantage")
    if "advantage" in columns:  # one a token: the mean over those that count
        mask = flat["mask"] != 0
        of_tokens = columns["advantage"].take(rows, lengths).flat
        with np.errstate(invalid="ignore"):
            mean = _sums(np.where(mask, of_tokens, 0), lengths) / _sums(mask, lengths)
        advantage = np.where(np.isnan(advantage), mean, advantage)
    named = [table.name(i) for i in rows]
    prompts = table.names.get("prompt_id", [None] * len(table.rows))
    prompts = [named[k] if prompts[i] is None else str(prompts[i]) for k, i in enumerate(rows)]
    return Rollouts(
        starts=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        mask=flat["mask"] != 0 if "mask" in flat else np.zeros(0, bool),
        logp_rollout=flat["logp_rollout"],
        logp_train=flat["logp_train"],
        version_rollout=drawn,
        version_train=trained,
        step=whole(step),
        prompt_id=np.array(prompts, object),
        sample_id=np.array(named, object),
        logp_sync=logp_sync,
        logp_old=flat.get("logp_old"),
        token_ids=whole(flat["token_ids"]) if "token_ids" in flat else None,
        **{name: flat.get(name) for name in EXTRA},
        **{name: tops.get(name) for name in TOPS},
        advantage=advantage,
        **{name: scalar(name) for name in SCALARS if name not in ("version_train", "step", "advantage")},
    )


def _bad_values(rollouts: Rollouts, columns: dict[str, Ragged], rows: np.ndarray) -> tuple[Rollouts, list[Refused]]:
    """Tokens without a value masked out, and rows with impossible values left out."""
    if not len(rows):
        return rollouts, []
    starts, lengths = rollouts.starts, rollouts.lengths
    weights = columns["mask"].take(rows, lengths).flat
    logp = {name: values for name in LOGPS if (values := getattr(rollouts, name)) is not None}
    absent = {name: np.isin(rows, np.flatnonzero(columns[name].lengths < 0)) for name in logp if name in columns}
    plain = np.ones(len(weights), bool)
    for values in logp.values():
        plain &= (values < 0) & (values > IMPOSSIBLE)
    odd = np.flatnonzero(~plain & rollouts.mask)  # everything below is about these tokens
    row = _rows_of(odd, starts)
    at = {name: values[odd] for name, values in logp.items()}
    none = {name: absent[name][row] if name in absent else np.ones(len(odd), bool) for name in at}  # or made of old
    null = np.zeros(len(odd), bool)
    for name in at.keys() & columns.keys():
        column = columns[name].take(rows, lengths)
        null |= column.null[odd] if column.null is not None else False
    left_out = {"missing_logprob": null} | _placeholders(rollouts, odd, at)
    used = ~np.logical_or.reduce(list(left_out.values()))
    bad = {
        "not_a_mask: nan, null or below 0": _rows_of(np.flatnonzero(~(weights >= 0)), starts),
        "nonfinite: nan": row[used & np.logical_or.reduce([np.isnan(at[name]) & ~none[name] for name in at])],
        "nonfinite: logp_rollout is -inf": row[used & np.isneginf(at["logp_rollout"])],
        "positive_logprob: ": row[used & np.logical_or.reduce([values > LOGP_TOLERANCE for values in at.values()])],
        "negative_lag: ": _rows_of(np.flatnonzero(_newer(rollouts)), starts),
    }
    refused, good = [], np.ones(len(rows), bool)
    for what, tokens in bad.items():
        reason, detail = what.split(": ")
        which = np.unique(tokens)
        refused += [Refused(str(rollouts.sample_id[i]), reason, detail=detail) for i in which[good[which]]]
        good[which] = False
    mask = rollouts.mask.copy()
    mask[odd[~used]] = False
    emptied = (_sums(rollouts.mask, lengths) > 0) & (_sums(mask, lengths) == 0)
    for reason, tokens in left_out.items():
        which, first, counts = np.unique(row[tokens], return_index=True, return_counts=True)
        for i, k, count in zip(which, np.flatnonzero(tokens)[first], counts, strict=True):
            if good[i]:
                seen = ", ".join(f"{name} {values[k]:.4g}" for name, values in at.items())
                detail = f"{seen} at token {odd[k] - starts[i] + 1} of {lengths[i]}"
                refused.append(Refused(str(rollouts.sample_id[i]), reason, int(count), bool(emptied[i]), detail))
        good[which[emptied[which]]] = False
    which = np.unique(_rows_of(np.flatnonzero((weights != 0) & (weights != 1)), starts))
    refused += [Refused(str(rollouts.sample_id[i]), "not_a_mask", 0, False, "weights") for i in which[good[which]]]
    rollouts = replace(rollouts, mask=mask)
    return rollouts if good.all() else rollouts.take(good), refused


def _newer(rollouts: Rollouts) -> np.ndarray:
    """Counted tokens that a later version drew than consumed them. bool (m,)"""
    trained = np.repeat(rollouts.version_train, rollouts.lengths)
    return rollouts.mask & (rollouts.version_rollout > trained) & (trained != MISSING)


def _placeholders(rollouts: Rollouts, odd: np.ndarray, at: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Which of the counted tokens `odd` hold a number that stands for none, by reason. bool (len(odd),) each"""
    q, scored, starts = (
        at["logp_rollout"],
        [values for name, values in at.items() if name != "logp_rollout"],
        rollouts.starts,
    )
    placeholder, observation, sampler_zero = np.zeros((3, len(odd)), bool)
    for values in at.values():
        placeholder |= (values == 1) | ((values <= IMPOSSIBLE) & (values > -np.inf))
    for values in scored:
        placeholder |= (values == 0) & (q < -DISAGREES)
        sampler_zero |= (q == 0) & (values < -DISAGREES)
    row = _rows_of(odd, starts)
    # a sampler cut down to one token says 0.0, and rightly so, wherever the trainer stands
    top_p = np.where(rollouts.top_p > 0, np.minimum(rollouts.top_p, 1), 1)
    allowed = np.where((rollouts.temperature == 0) | (rollouts.top_k == 1), np.inf, DISAGREES - np.log(top_p))
    lowest = np.fmin.reduce(scored)
    zeros = np.flatnonzero(sampler_zero & (lowest < -allowed[row]))
    if len(zeros):
        row, places = row[zeros], odd[zeros]
        # runs of neighbours within a row; only one that ends before its row does is text that nobody sampled
        begins = (np.diff(places, prepend=-2) != 1) | (np.diff(row, prepend=-1) != 0)
        run = np.cumsum(begins) - 1
        size = np.bincount(run)
        first = np.flatnonzero(begins)
        counted = np.flatnonzero(rollouts.mask)
        last = counted[np.searchsorted(counted, starts[row[first] + 1]) - 1]
        inside = (size > 1) & (places[first] + size - 1 != last)
        observation[zeros[inside[run]]] = True
        placeholder[zeros[~inside[run]]] = True
    return {"placeholder": placeholder, "observation_tokens": observation & ~placeholder}


def _rows_of(tokens: np.ndarray, starts: np.ndarray) -> np.ndarray:
    """The row of each flat place."""
    return np.searchsorted(starts, tokens, side="right") - 1


def _sums(flat: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Sum of each row's values; 0 of an empty row."""
    total, some = np.zeros(len(lengths), np.int64 if flat.dtype == bool else flat.dtype), lengths > 0
    if some.any():
        total[some] = np.add.reduceat(flat, (np.cumsum(lengths) - lengths)[some], dtype=total.dtype)
    return total
