"""The tests inside other people's trainers, run by `make test-adapters` in an environment of their own."""

import os

import pytest
import torch

torch.set_num_threads(1)  # the model is small, and threads that wait for each other cost more than they give
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")  # rollout_func is experimental, says TRL
os.environ.setdefault("HF_HUB_OFFLINE", "1")


@pytest.fixture(scope="session")
def folder():
    """The small Qwen3 on sort8."""
    from realmodel.policy import small

    return small.resolve("small", "sort8")
