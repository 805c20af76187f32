"""`check` refuses what cannot be, names the field and the place, and lets legal oddities through."""

import dataclasses
import math

import numpy as np
import pytest
import torch
from hypothesis import given

from sandbox.arrays import logsumexp
from sandbox.batch import Batch, check
from sandbox.errors import BadInput
from tests.strategies import batches

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
