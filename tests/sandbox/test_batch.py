"""`check` refuses what cannot be, names the field and the place, and lets legal oddities through."""

import dataclasses
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sandbox.arrays import logsumexp
from sandbox.batch import Batch, check, chunks, pack, unpack
from sandbox.corrections import PRESETS
from sandbox.errors import BadInput
from tests.support.strategies import batches

GOOD = Batch(
    logp_train=np.array([[-0.1, -2.0, -0.5], [-0.3, -math.inf, 0.0]]),  # the trainer may rule a token out
    logp_rollout=np.array([[-0.2, -1.0, math.nan], [0.0, -3.0, -9999.0]]),  # masked places hold anything
    mask=np.array([[True, True, False], [True, True, False]]),
    advantage=np.array([[1.0], [-2.0]]),
    logp_sync=np.array([[-0.1, -1.5, 4.0], [-0.3, -1.0, -math.inf]]),
    version_rollout=np.array([[3], [4]]),
    version_train=4,
)


@given(batches())
def test_good_batches_pass(batch: Batch):
    assert check(batch) is batch


def test_legal_oddities_pass():
    assert check(GOOD) is GOOD


def with_entry(field: str, index: tuple[int, int], value: float) -> Batch:
    array = np.array(getattr(GOOD, field))
    array[index] = value
    return dataclasses.replace(GOOD, **{field: array})


def with_table(*p: float) -> Batch:
    """These probabilities at every place, whole vocabulary or top k; anything where masked."""
    table = np.where(GOOD.mask[..., None], np.log(p), 7.0)
    return dataclasses.replace(GOOD, logp_train_all=table)


def test_a_whole_vocabulary_and_a_top_k_pass():
    for p in ((0.5, 0.3, 0.2), (0.5, 0.3), (1 - 1e-6, 0.004)):
        assert check(with_table(*p)).logp_train_all is not None


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (with_entry("logp_train", (0, 1), math.nan), r"logp_train\[0, 1\] is nan"),
        (with_entry("logp_sync", (1, 0), 0.03), r"logp_sync\[1, 0\] is above 0"),
        (with_entry("logp_rollout", (1, 1), -math.inf), r"logp_rollout\[1, 1\] is -inf for a token that was drawn"),
        (with_entry("advantage", (1, 0), math.inf), r"advantage\[1, 0\] is not finite"),
        (with_entry("version_rollout", (0, 0), 5), r"version_rollout\[0, 0\] is newer than version_train 4"),
        (dataclasses.replace(GOOD, mask=np.ones((2, 3))), "mask has dtype float64, expected bool"),
        (dataclasses.replace(GOOD, logp_sync=np.zeros((2, 2))), r"logp_sync has shape \(2, 2\), expected \(2, 3\)"),
        (dataclasses.replace(GOOD, logp_rollout=np.zeros((2, 1))), r"logp_rollout has shape \(2, 1\)"),
        (dataclasses.replace(GOOD, logp_train_all=np.zeros((2, 3))), r"logp_train_all has shape \(2, 3\), expected"),
        (with_table(1.0, 0.03), r"logp_train_all\[0, 0\] has probabilities that sum to more than 1"),
        (dataclasses.replace(GOOD, logp_train=np.zeros(3)), r"logp_train has shape \(3,\), expected \(B, T\)"),
    ],
)  # fmt: skip
def test_bad_batches_are_refused_with_field_and_place(batch: Batch, message: str):
    with pytest.raises(BadInput, match=message):
        check(batch)
    if batch.logp_train.ndim == 2:
        values = {f.name: getattr(batch, f.name) for f in dataclasses.fields(batch)}
        tensors = {name: torch.tensor(v) if isinstance(v, np.ndarray) else v for name, v in values.items()}
        with pytest.raises(BadInput, match=message.replace("float64", "torch.float64")):
            check(Batch(**tensors))


def test_rounding_above_zero_is_not_refused():
    assert check(with_entry("logp_sync", (1, 0), 2e-7))


@pytest.mark.parametrize("convert", [np.asarray, torch.tensor])
def test_logsumexp(convert):
    x = convert([[-1000.0, -1000.0 + math.log(3)], [-math.inf, -math.inf], [-math.inf, 2.0]])
    result = np.asarray(logsumexp(x))
    np.testing.assert_allclose(result, [-1000 + math.log(4), -math.inf, 2.0])
    assert logsumexp(x, axis=0, keepdims=True).shape == (1, 2)


@given(batches(), st.randoms(use_true_random=False))
def test_packed_responses_are_corrected_like_unpacked_ones(batch: Batch, random):
    """Lay several responses into rows of one packed batch, in random order with gaps: nothing crosses a border."""
    rows = list(range(len(batch.mask)))
    random.shuffle(rows)
    cut = random.randint(1, len(rows))
    lines = [line for line in (rows[:cut], rows[cut:]) if line]
    width = batch.mask.shape[1]
    length = max(map(len, lines)) * width
    fields = {f.name: getattr(batch, f.name) for f in dataclasses.fields(batch)}
    fields["advantage"] = np.broadcast_to(fields["advantage"], batch.mask.shape)
    segment = np.full((len(lines), length), -7)
    packed = {}
    for name, value in fields.items():
        if value is not None:
            packed[name] = np.full((len(lines), length, *value.shape[2:]), 0 if name == "mask" else np.nan, value.dtype)
            for i, line in enumerate(lines):
                packed[name][i, : len(line) * width] = value[line].reshape(-1, *value.shape[2:])
    for i, line in enumerate(lines):
        segment[i, : len(line) * width] = np.repeat(line, width)
    if not batch.mask.any():
        with pytest.raises(BadInput, match="mask has no counted token"):
            unpack(Batch(**packed), segment)
        return
    alone = unpack(Batch(**packed), segment)
    for convert in (np.asarray, torch.tensor):
        given = Batch(**{name: convert(value) for name, value in packed.items()})
        apart = unpack(given, convert(segment))
        np.testing.assert_array_equal(apart.mask, alone.mask)
        for name in ("seq_tis", "prefix_tis", "tis", "slime.mis"):
            weight = np.ones(batch.mask.shape) * PRESETS[name](batch).weight
            expected = np.zeros(segment.shape)
            for i, line in enumerate(lines):
                expected[i, : len(line) * width] = np.where(batch.mask, weight, 0.0)[line].ravel()
            again = pack(PRESETS[name](apart).weight, given, convert(segment))
            np.testing.assert_allclose(np.asarray(again), expected, rtol=1e-12, err_msg=name)


def test_unpack_keeps_order_gradient_and_versions():
    logp = torch.tensor([[-1.0, -2.0, -3.0, math.nan], [-4.0, -5.0, -6.0, -7.0]], requires_grad=True)
    packed = Batch(
        logp, logp.detach(), torch.tensor([[True, True, True, False], [True] * 4]), torch.tensor([[1.0], [2.0]]),
        version_rollout=torch.tensor([[3, 3, 4, 0], [5, 5, 5, 6]]), version_train=6,
    )  # fmt: skip
    apart = unpack(packed, torch.tensor([[9, 9, 2, 2], [1, 1, 9, 9]]))
    rows = [[-1.0, -2.0], [-3.0], [-4.0, -5.0], [-6.0, -7.0]]
    assert [apart.logp_train[i][apart.mask[i]].tolist() for i in range(4)] == rows
    assert apart.advantage[:, 0].tolist() == [1.0, 1.0, 2.0, 2.0]
    assert apart.version_rollout[3].tolist() == [5, 6]
    assert apart.version_train == 6
    apart.logp("logp_train").sum().backward()
    assert logp.grad.tolist() == [[1.0, 1.0, 1.0, 0.0], [1.0] * 4]
    with pytest.raises(BadInput, match=r"segment has shape \(2, 3\)"):
        unpack(packed, torch.zeros(2, 3))


def test_chunks_are_the_batch():
    pieces = list(chunks(GOOD, tokens=3))
    assert [p.mask.shape for p in pieces] == [(1, 3), (1, 3)]
    np.testing.assert_array_equal(np.concatenate([p.logp_train for p in pieces]), GOOD.logp_train)
    assert len(list(chunks(GOOD.rows(slice(0, 0))))) == 1


def test_versions_may_be_per_token():
    mixed = dataclasses.replace(GOOD, version_rollout=np.array([[3, 4, 0], [4, 4, 4]]))
    assert check(mixed) is mixed
    with pytest.raises(BadInput, match=r"version_rollout\[0, 1\] is newer"):
        check(dataclasses.replace(GOOD, version_rollout=np.array([[3, 5, 0], [4, 4, 4]])))
