"""Every dump as its framework writes it; damaged and mutated dumps are refused by rows, never a traceback."""

import json
import math
import pickle
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from realmodel import diagnosis, readers
from sandbox.errors import BadInput
from sandbox.rollouts import Refused, collect

Q, N = [-0.5, -1.25, -2.0], [-0.6, -1.0, -2.1]


def lines(path: Path, *rows) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def loaded(path: Path, **options):
    return collect(readers.read([path], **options))


def test_nemo_rl(tmp_path):
    row = {
        "content": "x",
        "rewards": 1.0,
        "input_lengths": 5,
        "token_ids": [7, 8, 1, 2, 3, 0],
        "token_loss_mask": [0, 0, 1, 1, 1, 0],
        "sample_loss_mask": 1.0,
        "advantages": [0, 0, 0.5, 0.5, 0.5, 0],
        "generation_logprobs": [0, 0, *Q, 0],
        "prev_logprobs": [0, -3, *N, 0],
    }
    path = lines(tmp_path / "train_data_step7.jsonl", row, row | {"sample_loss_mask": 0})
    got = loaded(path)
    assert got.logp_rollout[got.mask].tolist() == Q
    assert got.logp_train[got.mask].tolist() == N
    assert got.logp_sync is None  # prev is "old", never the trainer at the sampler's weights
    assert (got.rows["step"][0], got.rows["reward"][0], got.rows["advantage"][0]) == (7, 1, 0.5)
    assert [r.code for r in got.refused] == ["empty"]


def test_prime_rl(tmp_path):
    folder = tmp_path / "token_exports" / "step_3"
    folder.mkdir(parents=True)
    row = {
        "schema_version": 1, "step": 3, "rank": 1, "micro_step": 0, "micro_sequence_idx": 0, "export_sequence_idx": 0,
        "token_ids": [9, 1, 2, 3], "loss_mask": [False, True, True, True], "advantages": [0.0, 1.5, 1.5, 1.5],
        "inference_logprobs": [0.0, *Q], "trainer_logprobs": [-4.0, *N],
    }  # fmt: skip
    lines(folder / "rank_1.jsonl", row, row | {"export_sequence_idx": 1}, row)
    got = loaded(tmp_path)
    assert got.logp_rollout[got.mask].tolist() == Q * 2
    assert got.rows["rank"].tolist() == [1, 1]
    assert [r.code for r in got.refused] == ["duplicate"]


@pytest.mark.parametrize("miles", [False, True])
def test_slime_and_miles(tmp_path, miles):
    import torch

    sample = {"index": 4, "tokens": [8, 9, 1, 2, 3], "response_length": 3, "loss_mask": torch.tensor([1, 1, 1]),
              "rollout_log_probs": torch.tensor(Q), "log_probs": torch.tensor(N), "weight_versions": ["2"],
              "reward": 0.5, "advantages": torch.tensor([2.0] * 3)}  # fmt: skip
    if miles:
        sample |= {"old_log_probs": torch.tensor(N), "train_log_probs": torch.tensor(Q)}
    path = tmp_path / "0_0.pt"
    torch.save({"format_version": 2, "rollout_id": 6, "rank": 0, "samples": [sample]}, path)
    got = loaded(path)
    np.testing.assert_allclose(got.logp_rollout, Q, rtol=1e-6)
    np.testing.assert_allclose(got.logp_train, Q if miles else N, rtol=1e-6)
    assert got.logp_old is not None
    np.testing.assert_allclose(got.logp_old, N, rtol=1e-6)
    assert (got.version_rollout[0], got.rows["step"][0], got.rows["advantage"][0]) == (2, 6, 2)


def test_untrusted_pickles_are_not_run(tmp_path):
    hit = tmp_path / "hit"

    class Trap:
        def __reduce__(self):
            return (Path.touch, (hit,))

    import torch

    (tmp_path / "a.pkl").write_bytes(pickle.dumps(Trap()))
    torch.save({"samples": [Trap()]}, tmp_path / "b.pt")
    for name in ("a.pkl", "b.pt"):
        (refused,) = readers.read([tmp_path / name])
        assert isinstance(refused, Refused)
        assert "--trust-pickle" in refused.reason
        assert not hit.exists()
    list(readers.read([tmp_path / "b.pt"], trust_pickle=True))
    assert hit.exists()


def test_parquet_keeps_null_and_nan_apart_and_maps_names(tmp_path):
    frame = pl.DataFrame({"q": [Q, [-1.0, None], [math.nan], []], "pi": [N, [-1.0, -2.0], [-1.0], []]})
    path = tmp_path / "x.bin"  # told from the content
    frame.write_parquet(path)
    got = loaded(path, columns={"logp_rollout": "q", "logp_train": "pi"})
    assert got.mask.tolist() == [True] * 4 + [False]
    assert [(r.code, r.tokens) for r in got.refused] == [("placeholder", 1), ("nonfinite", 0), ("empty", 0)]
    with pytest.raises(BadInput, match="no column 'r'"):
        loaded(path, columns={"logp_rollout": "r"})
    with pytest.raises(BadInput, match="no canonical column"):
        loaded(path, columns={"logq": "q"})
    with pytest.raises(BadInput, match="expected one of"):
        loaded(path, format="verl")


def test_a_cut_line_is_refused_and_the_rest_is_read(tmp_path):
    path = lines(tmp_path / "a.jsonl", {"logp_rollout": Q, "logp_train": N}, {"other": 1}, [1])
    path.write_text(path.read_text() + '{"logp_rollout": [-0.5, NaN], "logp_train": [-0.5, -1]}\n{"logp_rollout": [-0.')
    got = loaded(path)
    assert got.n == 1
    assert [r.code for r in got.refused] == ["mixed_schema", "malformed", "nonfinite", "unreadable"]


def _good(rng: np.random.Generator) -> list[dict]:
    rows = []
    for i in range(6):
        n = int(rng.integers(2, 6))
        q = -rng.exponential(1, n) - 0.01
        row = {"step": i // 3, "sample_id": i, "prompt_id": 0, "mask": [1] * n, "reward": 1.0}
        row |= {"logp_rollout": q.tolist(), "logp_train": (q * 1.01).tolist(), "version_rollout": 1, "version_train": 2}
        rows.append(row)
    return rows


def _mutated(rng: np.random.Generator, path: Path) -> int | None:
    """Write a mutated dump; its number of rows where that is known."""
    rows = _good(rng)
    kind = rng.integers(5)
    row = rows[rng.integers(len(rows))]
    name = list(row)[rng.integers(len(row))]
    if kind == 0:
        del row[name]
    elif kind == 1:
        row[name] = [None, "x", [], [[1]], {}, True, 10**400, "NaN", [None], ["a"], -1, 1e308, [10**400]][
            rng.integers(13)
        ]
    elif kind == 2:
        row["logp_train"] = row["logp_train"][: rng.integers(len(row["logp_train"]))]
    elif kind == 3:
        at = rng.integers(len(row["logp_rollout"]))
        row["logp_rollout"][at] = [None, math.nan, -math.inf, math.inf, 3, "x", -9999, 0.0][rng.integers(8)]
    text = "".join(json.dumps(row) + "\n" for row in rows).encode()
    if kind < 4:
        path.write_bytes(text)
        return len(rows)
    if rng.random() < 0.5:
        pl.DataFrame(rows).write_parquet(path)
        text = path.read_bytes()
    data = bytearray(text)
    for at in rng.integers(len(data), size=3):
        data[at] ^= 1 << int(rng.integers(8))
    path.write_bytes(data[: rng.integers(len(data))] if rng.random() < 0.3 else data)
    return None


def _fuzz(tmp_path: Path, seeds: range) -> None:
    for seed in seeds:
        path = tmp_path / f"{seed}"
        total = _mutated(np.random.default_rng(seed), path)
        try:
            outcome, table = diagnosis.run((path,), None, (), None, False)
        except BadInput:
            continue
        whole = [r for r in table.refused if not r.tokens]
        assert outcome["n_responses"] == table.n
        assert total is None or table.n + len(whole) == total, seed
        diagnosis.tables(outcome)
        path.unlink()


def test_mutated_dumps(tmp_path):
    _fuzz(tmp_path, range(100))


@pytest.mark.slow
def test_many_mutated_dumps(tmp_path):
    _fuzz(tmp_path, range(100, 2100))
