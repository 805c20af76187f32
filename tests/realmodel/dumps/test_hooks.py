"""Hooks: tensors as verl and TRL shape them, written as the canonical table, read back and diagnosed."""

from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import polars as pl
import pytest
import torch

from realmodel.dumps import diagnosis, hooks
from sandbox.errors import BadInput

LENGTHS = (3, 5, 2, 4)
WIDTH = 7


def tensors() -> tuple[torch.Tensor, ...]:
    """q, old, mask and ids of four responses padded to seven tokens; the second token of the first is a tool's."""
    rng = np.random.default_rng(0)
    q, old, ids = torch.zeros(4, WIDTH), torch.zeros(4, WIDTH), torch.zeros(4, WIDTH, dtype=torch.long)
    mask = torch.zeros(4, WIDTH, dtype=torch.long)
    for i, n in enumerate(LENGTHS):
        q[i, :n] = torch.tensor(-rng.exponential(size=n) - 0.1)
        old[i, :n] = q[i, :n] * 1.05
        ids[i, :n] = torch.tensor(rng.integers(1, 9, n))
        mask[i, :n] = 1
    mask[0, 1] = 0
    return q, old, mask, ids


@pytest.mark.parametrize("framework", ["verl", "trl"])
def test_hooks_write_what_is_read_and_diagnosed(framework: str, tmp_path: Path):
    q, old, mask, ids = tensors()
    advantage = torch.tensor([1.0, -1.0, 0.5, -0.5])
    if framework == "verl":
        scores = torch.zeros_like(q)
        scores[:, 1] = torch.tensor([1.0, 0.0, 1.0, 0.0])
        batch = {"rollout_log_probs": q, "old_log_probs": old, "responses": ids, "response_mask": mask}
        batch |= {"advantages": advantage[:, None] * mask, "token_level_scores": scores}
        uid = np.array(["a", "a", "b", "b"], object)
        data = SimpleNamespace(batch=batch, non_tensor_batch={"uid": uid})
        write = partial(hooks.verl, tmp_path, data, step=7, lag=0)
    else:
        prompts = torch.tensor([[0, 4, 5], [0, 4, 5], [1, 2, 3], [1, 2, 3]])
        output = {"prompt_ids": prompts, "prompt_mask": (prompts > 0).long(), "completion_ids": ids}
        output |= {"completion_mask": (ids > 0).long(), "tool_mask": mask, "sampling_per_token_logps": q}
        output |= {"old_per_token_logps": old, "advantages": advantage}
        write = partial(hooks.trl, tmp_path, output, step=7, rank=3, lag=0)
    path = write()
    table = pl.read_parquet(path)
    assert [len(row) for row in table["logp_rollout"]] == list(LENGTHS)
    assert table["mask"][0].to_list() == [True, False, True]
    np.testing.assert_array_equal(np.array(table["logp_train"][1]), old[1, :5].double().numpy())
    assert table["token_ids"][2].to_list() == ids[2, :2].tolist()
    assert (table["version_rollout"][0], table["version_train"][0], table["step"][0]) == (7, 7, 7)
    assert table["prompt_id"].n_unique() == 2
    if framework == "verl":
        assert table["reward"].to_list() == [1.0, 0.0, 1.0, 0.0]
    content = path.read_bytes()
    write()  # the same step again: nothing is overwritten
    assert path.read_bytes() == content
    outcome, _ = diagnosis.run((tmp_path,), None, (), None, False)
    assert outcome["n_responses"] == 8
    assert outcome["n_tokens"] == 2 * (sum(LENGTHS) - 1)


def test_hooks_without_what_they_need(tmp_path: Path):
    batch = SimpleNamespace(batch={"old_log_probs": torch.zeros(1, 2)}, non_tensor_batch={})
    with pytest.raises(BadInput, match="rollout_log_probs is not in the batch"):
        hooks.verl(tmp_path, batch, step=0)
    with pytest.raises(BadInput, match="sampling_per_token_logps is not in the batch"):
        hooks.trl(tmp_path, {}, step=0)
    zeros = torch.zeros(1, 2)
    batch.batch |= {name: zeros for name in ("rollout_log_probs", "responses", "advantages", "token_level_scores")}
    batch.batch["response_mask"], batch.non_tensor_batch["uid"] = zeros, np.array(["a"])
    with pytest.raises(BadInput, match="lag is 2 at step 1"):
        hooks.verl(tmp_path, batch, step=1, lag=2)
    assert not list(tmp_path.iterdir())
