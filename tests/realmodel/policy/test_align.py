"""Rollout -> Batch: the shift against a slow loop on ragged sequences, and everything that must be refused."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from realmodel.policy.align import Rollout, pad, part, predicted_by, to_batch, wanted
from sandbox.errors import BadInput

V = 7
PROMPTS = [[3, 4], [5, 3, 6, 2], [2]]
RESPONSES = [[6, 5, 4, 1], [2], [3, 3, 1]]
FIELDS = ("logp_train", "logp_sync", "logp_rollout")


def rollout() -> Rollout:
    rng = np.random.default_rng(0)
    logp_all = [np.log(rng.dirichlet(np.ones(V), len(r))).astype(np.float32) for r in RESPONSES]
    return Rollout(
        prompt_ids=PROMPTS,
        response_ids=RESPONSES,
        logp=[rows[range(len(r)), r] for rows, r in zip(logp_all, RESPONSES, strict=True)],
        logp_all=logp_all,
        version=4,
        prompt_index=np.arange(3),
        finished=np.array([True, False, True]),
    )


def whole(seed: int) -> torch.Tensor:
    """Log-probabilities in which no two rows, sequences or tokens are alike. (3, 6, V)"""
    return torch.randn(3, 6, V, generator=torch.Generator().manual_seed(seed)).log_softmax(-1)


def asked(table: torch.Tensor, centre: bool = True, of: Rollout | None = None) -> torch.Tensor:
    """What the trainer answers: the wanted columns of the wanted rows of a whole table."""
    rows, columns = wanted(of or rollout(), table.shape[1], table.shape[2], centre)
    return table.flatten(0, 1)[rows].gather(-1, columns)


def batch(change=lambda r: r, **other):
    drawn = rollout()
    arguments = dict(ids=pad(drawn, pad_id=0)[0], advantage=np.array([1.0, -1.0, 0.5]), train=asked(whole(1)))
    arguments |= dict(version_train=6, sync=asked(whole(2)), centre=True)
    return to_batch(change(drawn), **(arguments | other))


def test_pad_puts_prompt_and_response_in_one_row():
    ids, attention = pad(rollout(), pad_id=9)
    assert ids.tolist() == [[3, 4, 6, 5, 4, 1], [5, 3, 6, 2, 2, 9], [2, 3, 3, 1, 9, 9]]
    assert attention.tolist() == [[1] * 6, [1] * 5 + [0], [1] * 4 + [0] * 2]


def test_every_field_agrees_with_a_slow_loop():
    got, train, sync, drawn = batch(), whole(1), whole(2), rollout()
    assert got.mask.shape == (3, 4)
    for b, (prompt, response) in enumerate(zip(PROMPTS, RESPONSES, strict=True)):
        sequence = prompt + response
        assert got.mask[b].tolist() == [t < len(response) for t in range(4)]
        for t in range(len(response)):
            position = len(prompt) + t  # of this token; the row before it predicts it
            assert sequence[position] == response[t]
            assert got.logp_train[b, t] == train[b, position - 1, sequence[position]]
            assert got.logp_sync[b, t] == sync[b, position - 1, sequence[position]]
            assert got.logp_rollout[b, t].item() == drawn.logp[b][t]
            assert torch.equal(got.logp_train_all[b, t], train[b, position - 1])
            assert torch.equal(got.logp_sync_all[b, t], sync[b, position - 1])
            np.testing.assert_array_equal(got.logp_rollout_all[b, t], drawn.logp_all[b][t])
    assert got.advantage.tolist() == [[1.0], [-1.0], [0.5]]
    assert got.version_rollout.tolist() == [[4]] * 3
    assert got.version_train == 6


def test_gradient_reaches_exactly_the_rows_that_predict_drawn_tokens():
    train = whole(1).requires_grad_()
    result = batch(train=asked(train))
    result.logp_train[result.mask].sum().backward()
    want = torch.zeros_like(train)
    for b, (prompt, response) in enumerate(zip(PROMPTS, RESPONSES, strict=True)):
        for t, token in enumerate(response):
            want[b, len(prompt) + t - 1, token] += 1
    assert torch.equal(train.grad, want)


def test_without_centring_no_vocabulary_is_needed():
    train = asked(whole(1), centre=False)
    got = batch(lambda r: replace(r, logp_all=None), train=train, centre=False, sync=None)
    assert torch.equal(got.logp_train, batch().logp_train)
    assert (got.logp_train_all, got.logp_sync_all, got.logp_rollout_all, got.logp_sync) == (None,) * 4


def test_the_top_k_are_asked_and_filled_in_the_samplers_order():
    top = [np.argsort(-rows, axis=-1)[:, :3] for rows in rollout().logp_all]
    values = [np.take_along_axis(rows, ids, -1) for rows, ids in zip(rollout().logp_all, top, strict=True)]
    some = replace(rollout(), logp_all=values, top_ids=top)
    assert (rollout().top, some.top, replace(some, logp_all=None).top) == (-1, 3, 0)
    got = batch(lambda r: some, train=asked(whole(1), of=some), sync=asked(whole(2), of=some))
    every = batch()
    assert torch.equal(got.logp_train, every.logp_train)
    for b, response in enumerate(RESPONSES):
        for t in range(len(response)):
            for name in ("logp_train_all", "logp_sync_all", "logp_rollout_all"):
                assert torch.equal(getattr(got, name)[b, t], getattr(every, name)[b, t][torch.from_numpy(top[b][t])])
    piece = part(some, slice(1, 3))
    assert (piece.prompt_ids, piece.response_ids) == (PROMPTS[1:], RESPONSES[1:])
    assert piece.prompt_index.tolist() == [1, 2]
    assert [x.tolist() for x in piece.top_ids] == [x.tolist() for x in top[1:]]


def test_predicted_by_is_what_the_probe_of_a_sync_uses():
    rows, tokens, mask = predicted_by(rollout())
    assert rows.tolist() == [[1, 2, 3, 4], [3, 0, 0, 0], [0, 1, 2, 0]]
    assert tokens[mask].tolist() == [6, 5, 4, 1, 2, 3, 3, 1]


def with_logp(row: int, value):
    def change(r: Rollout) -> Rollout:
        logp = list(r.logp)
        logp[row] = value
        return replace(r, logp=logp)

    return change


BAD = {
    "ids of another response": (dict(ids=torch.zeros(3, 6, dtype=torch.long)), r"ids\[0\] is not the prompt"),
    "ids shorter than the rollout": (dict(ids=pad(rollout(), 0)[0][:, :5]), r"ids\[0\] is not the prompt"),
    "rows missing": (dict(train=asked(whole(1))[:5]), r"train has shape \(5, 8\), expected \(8, 8\)"),
    "another batch": (dict(ids=pad(rollout(), 0)[0][:2]), "ids has shape"),
    "sync of another shape": (dict(sync=asked(whole(2))[..., :6]), r"sync has shape \(8, 6\)"),
    "advantage per token": (dict(advantage=np.ones((3, 4))), "advantage has shape"),
    "advantage nan": (dict(advantage=np.array([0, np.nan, 0])), r"advantage.* is not finite"),
    "older trainer": (dict(version_train=3), "version_rollout.* is newer than version_train 3"),
    "none": (with_logp(1, None), r"logp\[1\] is missing"),
    "a none inside": (with_logp(0, [None, -1.0, -1.0, -1.0]), r"logp\[0\] is missing"),
    "-inf": (with_logp(1, np.array([-np.inf])), r"logp_rollout\[1, 0\] is -inf"),
    "nan": (with_logp(1, np.array([np.nan])), r"logp_rollout\[1, 0\] is nan"),
    "positive": (with_logp(2, np.array([-1.0, 0.5, -1.0])), r"logp_rollout\[2, 1\] is above 0"),
    "logp too short": (with_logp(2, np.array([-1.0, -1.0])), r"logp\[2\] has shape \(2,\) for a response of 3"),
    "a row missing": (lambda r: replace(r, logp=r.logp[:2]), "logp has 2 rows for 3 responses"),
    "empty response": (lambda r: replace(r, response_ids=[[], *RESPONSES[1:]]), r"response_ids\[0\] is empty"),
    "empty prompt": (lambda r: replace(r, prompt_ids=[*PROMPTS[:2], []]), r"prompt_ids\[2\] is empty"),
    "no vocabulary": (lambda r: replace(r, logp_all=None), "logp_all is missing"),
    "other vocabulary": (
        lambda r: replace(r, logp_all=[rows[:, :6] for rows in r.logp_all]),
        r"logp_all\[0\] has shape \(4, 6\), expected \(4, 7\)",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_refused(case):
    bad, message = BAD[case]
    with pytest.raises(BadInput, match=message) as error:
        batch(**bad) if isinstance(bad, dict) else batch(bad)
    assert "\n" not in str(error.value)
