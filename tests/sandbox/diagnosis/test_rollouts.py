"""What is refused and what is not: the entries practitioners report, and every row against a loop over its tokens."""

import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandbox.diagnosis.dumps import table_of
from sandbox.diagnosis.refusals import check
from sandbox.diagnosis.rollouts import REASONS, Chunk, Ragged, Refused

NAN, INF = math.nan, math.inf


def checked(*rows: dict[str, Any], lag: int | None = None, seen: set | None = None) -> Chunk:
    return check(table_of("d", np.arange(len(rows)), list(rows), []), set() if seen is None else seen, lag)


def row(q: list, p: list, **rest: Any) -> dict[str, Any]:
    return {"logp_rollout": q, "logp_train": p, **rest}


def told(chunk: Chunk) -> list[tuple[str, int, bool]]:
    return [(r.reason, r.tokens, r.whole) for r in chunk.refused]


def counted(chunk: Chunk) -> list[list[float]]:
    """The sampler's log-probabilities of the counted tokens of each response in use."""
    r = chunk.rollouts
    return [r.logp_rollout[a:b][r.mask[a:b]].tolist() for a, b in zip(r.starts[:-1], r.starts[1:], strict=True)]


# Retokenisation: only the tokens before the first that differs were scored in the same context.


def test_p06_ids_differ_keeps_the_common_prefix():
    q, p = [-0.1, -0.2, -0.3], [-0.1, -4.0, -0.3]
    chunk = checked(row(q, p, token_ids=[11, 22, 33], trainer_token_ids=[11, 55, 33]))
    assert (counted(chunk), told(chunk)) == ([[-0.1]], [("ids_differ", 2, False)])
    longer = row(q, [*p, -0.7, -0.8], token_ids=[11, 22, 33], trainer_token_ids=[11, 22, 90, 91, 92])
    none = row(q, p, token_ids=[11, 22, 33], trainer_token_ids=[12, 22, 33])
    chunk = checked(longer, none)
    assert (counted(chunk), told(chunk)) == ([[-0.1, -0.2]], [("ids_differ", 3, False), ("ids_differ", 3, True)])


def test_p06_same_ids_are_not_flagged():
    q, p = [-0.1, -0.2, -0.3], [-0.1, -4.0, -0.3]
    chunk = checked(row(q, p, token_ids=[11, 22, 33], trainer_token_ids=[11, 22, 33]), row([], [], token_ids=[]))
    assert (counted(chunk), told(chunk)) == ([q, []], [])


@pytest.mark.parametrize("short", ["logp_rollout", "logp_train", "token_ids", "mask", "logp_old", "version_rollout"])
def test_p07_lengths_differ(short: str):
    whole = row([-0.1] * 4, [-0.2] * 4, token_ids=[1] * 4, mask=[1] * 4, logp_old=[-0.2] * 4, version_rollout=[3] * 4)
    chunk = checked(whole, whole | {short: whole[short][:3]}, whole)
    assert (len(counted(chunk)), told(chunk)) == (2, [("lengths_differ", 0, True)])


# Placeholders.


def test_p09_an_eos_put_back_by_hand():
    chunk = checked(row([-0.2, -0.3, 0.0], [-0.2, -0.3, -4.60517]))
    assert (counted(chunk), told(chunk)) == ([[-0.2, -0.3]], [("placeholder", 1, False)])
    assert chunk.refused[0].detail == "logp_rollout 0, logp_train -4.605 at token 3 of 3"


@pytest.mark.parametrize(
    "rows",
    [
        row([0.0, -0.3], [-1e-6, -0.3]),
        row([0.0, -0.3], [-0.4, -0.3]),  # less than DISAGREES
        row([-0.0, 0.0, 0.0], [0.0, -1e-7, 0.0]),
        row([0.0, 0.0, -0.2], [-4.0, -3.0, -0.2], top_k=1),  # one token was left to draw from
        row([0.0, 0.0, -0.2], [-4.0, -3.0, -0.2], temperature=0.0),
        row([0.0, -0.2], [-1.5, -0.2], top_p=0.2),  # the likeliest token alone may hold 0.2
        row([-99.0, -0.3], [-98.0, -0.3]),
    ],
)
def test_p09_a_genuine_zero_is_not_flagged(rows: dict[str, Any]):
    chunk = checked(rows)
    assert (counted(chunk), told(chunk)) == ([rows["logp_rollout"]], [])


def test_p09_a_trainers_zero_that_the_sampler_denies():
    chunk = checked(row([-3.0, -0.3, -0.2], [0.0, -0.3, -0.2]), row([0.0, -0.2], [-1.5, -0.2], top_p=0.9))
    assert (counted(chunk), told(chunk)) == ([[-0.3, -0.2], [-0.2]], [("placeholder", 1, False)] * 2)


def test_p10_observation_tokens_masked_or_not():
    q, p = [-0.5, 0.0, 0.0, -0.7], [-0.5, -4.0, -6.0, -0.7]
    assert told(checked(row(q, p, mask=[1, 0, 0, 1]))) == []
    chunk = checked(row(q, p), row(q[:3], p[:3]), row([-0.5, 0.0, -0.7], [-0.5, -4.0, -0.7]))
    assert counted(chunk) == [[-0.5, -0.7], [-0.5], [-0.5, -0.7]]
    assert Counter(told(chunk)) == {  # a run at the end is padding, a single one a value that was not there
        ("observation_tokens", 2, False): 1,
        ("placeholder", 2, False): 1,
        ("placeholder", 1, False): 1,
    }


def test_p10_runs_do_not_cross_rows():
    chunk = checked(row([-0.5, 0.0], [-0.5, -4.0]), row([0.0, -0.5], [-6.0, -0.5]))
    assert told(chunk) == [("placeholder", 1, False)] * 2


@pytest.mark.parametrize("value", [-9999.0, 1.0, -1e4, -100.0])
@pytest.mark.parametrize("engine", ["logp_rollout", "logp_train"])
def test_p11_numbers_that_stand_for_none(value: float, engine: str):
    given_row = row([-0.4, -0.5, -0.6], [-0.4, -0.5, -0.6])
    given_row[engine] = [-0.4, value, -0.6]
    chunk = checked(given_row)
    assert (counted(chunk), told(chunk)) == ([[-0.4, -0.6]], [("placeholder", 1, False)])
    nothing = checked(row([-9999.0] * 2, [-0.4, -0.5]))
    assert (counted(nothing), told(nothing)) == ([], [("placeholder", 2, True)])


def test_p12_null_is_one_token_nan_is_the_row():
    chunk = checked(row([-0.4, None, -0.6], [-0.4, -0.5, -0.6]), row([NAN] * 3, [-0.4, -0.5, -0.6]))
    assert (counted(chunk), Counter(told(chunk))) == (
        [[-0.4, -0.6]],
        {("missing_logprob", 1, False): 1, ("nonfinite", 0, True): 1},
    )
    one_nan, masked = row([-0.4, NAN], [-0.4, -0.5]), row([NAN, -0.4], [NAN, -0.4], mask=[0, 1])
    assert (counted(checked(one_nan, masked)), told(checked(one_nan, masked))) == ([[-0.4]], [("nonfinite", 0, True)])


def test_p13_infinities_and_positive_values():
    kept, q_zero, positive = row([-0.7] * 4, [-0.7, -0.7, -INF, -0.7]), row([-INF, -0.7], [-0.7] * 2), [0.03, -0.7]
    chunk = checked(kept, q_zero, row([-0.7] * 2, positive), row(positive, [-0.7] * 2), row([-0.7], [1e-6]))
    assert counted(chunk) == [[-0.7] * 4, [-0.7]]  # a trainer's -inf is a weight of 0 and stays in n
    assert told(chunk) == [("nonfinite", 0, True), ("positive_logprob", 0, True), ("positive_logprob", 0, True)]


# Versions.


def test_p40_p42_lag_is_of_the_consumer_and_missing_is_not_zero():
    chunk = checked(*[row([-0.1], [-0.2], version_rollout=v, version_train=6) for v in (5, None, 6, -1)])
    lags = chunk.rollouts.version_train - chunk.rollouts.version_rollout
    known = chunk.rollouts.version_rollout >= 0
    assert (lags[known].mean(), known.mean()) == (0.5, 0.5)
    assert not chunk.refused
    partial = checked(row([-0.1] * 3, [-0.2] * 3, version_rollout=[5, None, 6], version_train=8)).rollouts
    assert partial.version_rollout.tolist() == [5, -1, 6]


def test_negative_lag_and_versions_that_are_none():
    rows = [row([-0.1] * 2, [-0.2] * 2, version_rollout=v, version_train=6) for v in ([6, 7], 7, 5.5, INF, [6, 6])]
    assert told(checked(*rows)) == [("missing_version", 0, True)] * 2 + [("negative_lag", 0, True)] * 2
    masked = row([-0.1] * 2, [-0.2] * 2, version_rollout=[6, 7], version_train=6, mask=[1, 0])
    assert not checked(masked, row([-0.1], [-0.2], version_rollout=7)).refused  # nobody says when that was consumed


def test_old_stands_for_mu_only_at_equal_versions():
    rows = [
        row([-0.1] * 2, [-0.2] * 2, logp_old=[-0.3] * 2, version_rollout=v, version_train=6)
        for v in (6, 5, None, [6, 6], [5, 6])
    ]
    sync = checked(*rows).rollouts.logp_sync
    assert sync is not None
    np.testing.assert_array_equal(sync.reshape(5, 2)[:, 0], [-0.3, NAN, NAN, -0.3, NAN])
    assert checked(rows[1]).rollouts.logp_sync is None
    own = checked(rows[0] | {"logp_sync": [-0.4, -0.5]}).rollouts.logp_sync
    assert own is not None
    assert own.tolist() == [-0.4, -0.5]
    only_old = checked({"logp_rollout": [-0.1], "logp_old": [-0.7]}, row([-0.1], [-0.2]))
    assert only_old.rollouts.logp_train.tolist() == [-0.7, -0.2]


def test_duplicates_are_of_one_step_epoch_and_prompt():
    seen: set = set()
    same = row([-0.1], [-0.2], sample_id=3, prompt_id="a", step=1, epoch=0)
    others = [same | {"step": 2}, same | {"epoch": 1}, same | {"prompt_id": "b"}, same | {"sample_id": 4}]
    unnamed = row([-0.1], [-0.2])
    chunk = checked(same, *others, unnamed, unnamed, same, seen=seen)
    assert told(chunk) == [("duplicate", 0, True)]
    assert len(checked(same, unnamed, seen=seen).refused) == 1
    assert chunk.rollouts.sample_id.tolist() == ["3", "3", "3", "3", "4", "d:6", "d:7"]


def test_rows_without_one_engine_or_without_both():
    chunk = checked({"logp_rollout": [-0.1]}, {"logp_train": [-0.1]}, {"step": 1}, row([-0.1], [-0.1]))
    assert Counter(told(chunk)) == {("missing_logprob", 0, True): 2, ("mixed_schema", 0, True): 1}


def test_weights_are_no_mask():
    rows = [
        row([-0.1] * 3, [-0.2] * 3, mask=m) for m in ([1, 0.5, 0], [1, NAN, 1], [1, None, 1], [1, -1, 1], [0, 0, 0])
    ]
    chunk = checked(*rows)
    assert [len(q) for q in counted(chunk)] == [2, 0]
    assert Counter(told(chunk)) == {("not_a_mask", 0, True): 3, ("not_a_mask", 0, False): 1}


def test_advantage_of_tokens_is_their_mean():
    rows = [row([-0.1] * 2, [-0.2] * 2, advantage=a, mask=[1, 0]) for a in ([0.5, 9.0], 0.25, None)]
    np.testing.assert_array_equal(checked(*rows).rollouts.advantage, [0.5, 0.25, NAN])


# Every row against a loop over its tokens.


def slow(r: dict[str, Any]) -> tuple[list[bool] | None, set[str]]:
    """Mask of a row, None where it is refused, and the reasons, one token at a time."""
    tokens = list(zip(r["logp_rollout"], r["logp_train"], r["mask"], strict=True))
    if any(m is None or not m >= 0 for *_, m in tokens):
        return None, {"not_a_mask"}
    reasons, mask = set(), []
    zeros = [m != 0 and q == 0 and p is not None and p < -1 for q, p, m in tokens]
    last = max((i for i, t in enumerate(tokens) if t[2] != 0), default=-1)
    for i, (q, p, m) in enumerate(tokens):
        start, end = i, i
        while zeros[i] and start and zeros[start - 1]:
            start -= 1
        while zeros[i] and end + 1 < len(tokens) and zeros[end + 1]:
            end += 1
        observation = zeros[i] and end > start and end != last
        stands_for_none = any(x == 1 or (x is not None and -INF < x <= -100) for x in (q, p))
        trainer_zero = p == 0 and q is not None and q < -1
        none = q is None or p is None
        bad = none or zeros[i] or stands_for_none or trainer_zero
        mask.append(m != 0 and not bad)
        if m != 0 and bad:
            if none:
                reasons.add("missing_logprob")
            if stands_for_none or trainer_zero or (zeros[i] and not observation):
                reasons.add("placeholder")
            elif observation:
                reasons.add("observation_tokens")
    used = [(q, p) for (q, p, _), m in zip(tokens, mask, strict=True) if m]
    if any(math.isnan(x) for pair in used for x in pair) or any(q == -INF for q, _ in used):
        return None, {"nonfinite"}
    if any(x > 1e-5 for pair in used for x in pair):
        return None, {"positive_logprob"}
    if not any(mask) and any(m != 0 for *_, m in tokens):
        return None, reasons
    if any(m not in (0, 1) for *_, m in tokens):
        reasons.add("not_a_mask")
    return mask, reasons


LOGP = st.one_of(st.sampled_from([-0.5, -2.0, -0.5, 0.0, 0.0]), st.sampled_from([1.0, 0.03, -9999.0, NAN, -INF, None]))
TOKEN = st.tuples(LOGP, LOGP, st.sampled_from([1, 1, 1, 1, 0, 0.5]))
ROW = st.lists(TOKEN, max_size=6).map(lambda ts: row([t[0] for t in ts], [t[1] for t in ts], mask=[t[2] for t in ts]))


@given(st.lists(ROW, max_size=5))
def test_every_row_is_what_a_loop_over_its_tokens_says(rows: list[dict[str, Any]]):
    named = [r | {"sample_id": i} for i, r in enumerate(rows)]
    chunk = checked(*named)
    r = chunk.rollouts
    kept = {name: r.mask[a:b].tolist() for name, a, b in zip(r.sample_id, r.starts[:-1], r.starts[1:], strict=True)}
    for i, given_row in enumerate(rows):
        mask, reasons = slow(given_row)
        assert kept.get(str(i)) == mask
        mine = [x for x in chunk.refused if x.sample_id == str(i)]
        assert {x.reason for x in mine} <= (reasons or {"none"})
        assert any(x.whole for x in mine) == (mask is None)
        if mask is not None:
            assert {x.reason for x in mine} == reasons
            assert sum(x.tokens for x in mine if x.reason != "not_a_mask") >= sum(
                m != 0 for m in given_row["mask"]
            ) - sum(mask)
    assert len(kept) + sum(x.whole for x in chunk.refused) == chunk.n_rows == len(rows)


@given(st.lists(ROW, min_size=1, max_size=5), st.data())
def test_rows_do_not_touch_each_other(rows: list[dict[str, Any]], data: st.DataObject):
    named = [r | {"sample_id": i} for i, r in enumerate(rows)]
    order = data.draw(st.permutations(named))
    together, alone = checked(*order), [checked(r) for r in order]
    assert Counter(map(repr, together.refused)) == Counter(repr(r) for c in alone for r in c.refused)
    np.testing.assert_array_equal(
        together.rollouts.logp_train, np.concatenate([c.rollouts.logp_train for c in alone] or [[]])
    )


@given(st.lists(st.none() | st.lists(st.none() | st.floats(-3, 0), max_size=4), max_size=6), st.data())
def test_ragged_columns_against_lists(rows: list, data: st.DataObject):
    other = data.draw(
        st.lists(st.none() | st.lists(st.floats(-9, -4), max_size=4), min_size=len(rows), max_size=len(rows))
    )
    both = Ragged.of(rows).or_else(Ragged.of(other))
    expected = [a if a is not None else b for a, b in zip(rows, other, strict=True)]
    assert both.lengths.tolist() == [-1 if r is None else len(r) for r in expected]
    values = [x for r in expected if r is not None for x in r]
    null = both.null if both.null is not None else np.zeros(len(values), bool)
    assert [None if n else x for x, n in zip(both.flat.tolist(), null, strict=True)] == values
    cut = np.array([min(2, max(0, n)) for n in both.lengths[::-1]], np.int64)
    taken = both.take(np.arange(len(rows))[::-1], cut)
    flat = [x for r in expected[::-1] for x in (r or [])[:2]]
    np.testing.assert_array_equal(taken.flat, [NAN if x is None else x for x in flat])


def test_taking_rows():
    rows = [row([-0.1 * (i + 1)] * i, [-0.2] * i, version_rollout=1, sample_id=i) for i in range(4)]
    r = checked(*rows).rollouts.take(np.array([3, 0, 2]))
    assert r.lengths.tolist() == [3, 0, 2]
    assert r.row.tolist() == [0, 0, 0, 2, 2]
    assert r.sample_id.tolist() == ["3", "0", "2"]
    np.testing.assert_allclose(r.logp_rollout, [-0.4] * 3 + [-0.3] * 2)


def test_every_reason_says_what_it_is():
    assert all(REASONS.values())
    assert Refused("3", "duplicate").reason in REASONS
