"""Every format is read back to the responses it was written from; folders, maps, pickles; damaged files."""

import json
import pickle
from collections import Counter
from pathlib import Path

import numpy as np
import polars as pl
import pytest
import torch

from realmodel.dumps.readers import read
from sandbox.diagnosis.rollouts import REASONS, Chunk
from sandbox.errors import BadInput
from tests.support import dump_files
from tests.support.dump_files import WRITERS, canonical_rows, responses, save, write_lines


def everything(*paths: Path, **options) -> tuple[list[dict], Counter, int]:
    """Kept responses as dicts, reasons of what was left out, rows read."""
    kept, reasons, rows = [], Counter(), 0
    for chunk in read(paths, **options):
        check_counts(chunk)
        kept += unpacked(chunk)
        reasons.update(r.reason for r in chunk.refused)
        rows += chunk.n_rows
    return kept, reasons, rows


def check_counts(chunk: Chunk) -> None:
    """Rows kept and rows refused are the rows read, and what is kept is possible."""
    r, whole = chunk.rollouts, [x for x in chunk.refused if x.whole]
    n = len(r.starts) - 1
    if chunk.n_rows or n:
        assert n + len(whole) == chunk.n_rows
    assert {x.reason for x in chunk.refused} <= REASONS.keys()
    assert {len(v) for v in (r.mask, r.logp_rollout, r.logp_train, r.version_rollout)} == {r.starts[-1]}
    assert {len(v) for v in (r.version_train, r.step, r.reward, r.advantage, r.prompt_id, r.sample_id, r.rank)} == {n}
    q, p = r.logp_rollout[r.mask], r.logp_train[r.mask]
    assert np.isfinite(q).all()
    assert not np.isnan(p).any()
    assert (q <= 1e-5).all()
    assert (p <= 1e-5).all()


def unpacked(chunk: Chunk) -> list[dict]:
    r, rows = chunk.rollouts, []
    for i, (a, b) in enumerate(zip(r.starts[:-1], r.starts[1:], strict=True)):
        rows.append(
            {
                "q": r.logp_rollout[a:b],
                "train": r.logp_train[a:b],
                "old": None if r.logp_old is None else r.logp_old[a:b],
                "sync": None if r.logp_sync is None else r.logp_sync[a:b],
                "mask": r.mask[a:b],
                "ids": None if r.token_ids is None else r.token_ids[a:b],
                "version_rollout": r.version_rollout[a:b],
                **{k: getattr(r, k)[i] for k in ("version_train", "step", "reward", "advantage")},
                **{k: getattr(r, k)[i] for k in ("prompt_id", "sample_id")},
            }
        )
    return rows


@pytest.mark.parametrize("name", WRITERS)
def test_every_format_comes_back(name: str, tmp_path: Path):
    made = responses()
    path = WRITERS[name](tmp_path, made)
    kept, reasons, rows = everything(path)
    assert (len(kept), rows, reasons) == (len(made), len(made), Counter())
    names: dict[str, int] = {}
    for read_back, response in zip(kept, made, strict=True):
        counted = np.array(response["mask"], bool)
        for column, key in (("q", "q"), ("train", "old")):
            np.testing.assert_array_equal(read_back[column][read_back["mask"]], np.array(response[key])[counted])
        np.testing.assert_array_equal(read_back["ids"][read_back["mask"]], np.array(response["ids"])[counted])
        assert read_back["step"] == 4
        assert read_back["advantage"] == pytest.approx(response["advantage"], rel=1e-12)
        if name != "prime-rl":  # its exports hold no reward
            assert read_back["reward"] == response["reward"]
        # same prompt, same name; another prompt, another name
        assert names.setdefault(read_back["prompt_id"], response["prompt"][0]) == response["prompt"][0]
    assert len(names) == 3
    assert len({read_back["sample_id"] for read_back in kept}) == len(made)


@pytest.mark.parametrize(
    ("name", "drawn", "trained"),
    [("canonical json", 3, 4), ("nemo-rl", -1, -1), ("prime-rl", -1, -1), ("slime", -1, -1), ("miles", 3, -1)],
)
def test_versions_are_what_the_dump_says_or_missing(name: str, drawn: int, trained: int, tmp_path: Path):
    kept, _, _ = everything(WRITERS[name](tmp_path, responses()))
    assert {(v, row["version_train"]) for row in kept for v in row["version_rollout"]} == {(drawn, trained)}


@pytest.mark.parametrize("name", ["nemo-rl", "slime", "miles"])
def test_old_is_mu_only_where_the_versions_are_equal(name: str, tmp_path: Path):
    path = WRITERS[name](tmp_path, responses())
    assert all(row["sync"] is None for row in everything(path)[0])
    assert all(row["sync"] is None for row in everything(path, lag=2)[0])
    for row in everything(path, lag=0)[0]:
        np.testing.assert_array_equal(row["sync"], row["old"])
    lags = {int(row["version_train"] - v) for row in everything(path, lag=2)[0] for v in row["version_rollout"]}
    assert lags == {2}


def test_a_folder_is_read_in_the_order_of_its_steps(tmp_path: Path):
    for step in (9, 10, 2):
        dump_files.write_nemo(tmp_path / "logs", responses(3, seed=step), step)
    (tmp_path / "logs" / "notes.txt").write_text("not a dump")
    kept, reasons, _ = everything(tmp_path / "logs")
    assert [row["step"] for row in kept] == [2] * 3 + [9] * 3 + [10] * 3
    assert not reasons
    for rank in (0, 1):
        path = dump_files.write_prime(tmp_path / "prime", responses(3, seed=rank))
        path.rename(path.with_name(f"rank_{rank}.jsonl.keep"))
    for rank in (0, 1):
        kept_file = tmp_path / "prime" / "token_exports" / "step_4" / f"rank_{rank}.jsonl.keep"
        rows = [json.loads(line) | {"rank": rank} for line in kept_file.read_text().splitlines()]
        write_lines(kept_file.with_name(f"rank_{rank}.jsonl"), rows)
    kept, reasons, _ = everything(tmp_path / "prime")
    assert (len(kept), reasons) == (6, Counter())
    write_lines(tmp_path / "prime" / "rollouts" / "step_4" / "traces.jsonl", [{"logprobs": [-0.5]}])
    assert everything(tmp_path / "prime")[1] == Counter()
    dump_files.write_slime(tmp_path / "slime" / "train_data", responses(3))
    save(tmp_path / "slime" / "rollout_data" / "4.pt", {"rollout_id": 4, "samples": [{"rollout_log_probs": [-0.5]}]})
    assert everything(tmp_path / "slime")[1:] == (Counter(), 3)


def test_several_dumps_of_several_formats_at_once(tmp_path: Path):
    paths = [write(tmp_path / str(i), responses(seed=i)) for i, write in enumerate(WRITERS.values())]
    kept, _, rows = everything(*paths)
    assert len(kept) + len(paths) * 12 - rows == len(kept)
    assert rows == 12 * len(paths)


def test_columns_by_another_name(tmp_path: Path):
    rows = [{"lp": row["logp_rollout"], "mine": row["logp_train"], "x": 1} for row in canonical_rows(responses())]
    names = {"logp_rollout": "lp", "logp_train": "mine"}
    table = tmp_path / "theirs.parquet"
    pl.DataFrame(rows).write_parquet(table)
    for path in (write_lines(tmp_path / "theirs.jsonl", rows), table):
        kept, reasons, _ = everything(path, map=names)
        assert [row["q"].tolist() for row in kept] == [row["lp"] for row in rows]
        assert [row["train"].tolist() for row in kept] == [row["mine"] for row in rows]
        assert not reasons
        with pytest.raises(BadInput, match="it has lp, mine, x"):
            everything(path)
    for bad, told in (
        ({"logp": "lp"}, "no column of the canonical table"),
        ({"logp_rollout": "lp", "mask": "lp"}, "mapped twice"),
    ):
        with pytest.raises(BadInput, match=told):
            everything(path, map=bad)


def test_a_format_can_be_forced(tmp_path: Path):
    rows = [
        row | {"inference_logprobs": row["logp_rollout"], "trainer_logprobs": row["logp_rollout"]}
        for row in canonical_rows(responses())
    ]
    path = write_lines(tmp_path / "both.jsonl", rows)
    assert everything(path)[0][0]["train"].tolist() == rows[0]["logp_train"]
    assert everything(path, format="prime-rl")[0][0]["train"].tolist() == rows[0]["logp_rollout"]
    for format, told in (("verl", "expected one of"), ("slime", "no file of torch"), ("nemo-rl", None)):
        if told:
            with pytest.raises(BadInput, match=told):
                everything(path, format=format)
        else:
            assert everything(path, format=format)[1] == {"mixed_schema": 12}


class Runs:
    """A pickle that leaves a mark when it is opened."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def test_a_pickle_is_never_run_unless_the_user_says_so(tmp_path: Path):
    mark, good = tmp_path / "ran", dump_files.write_slime(tmp_path, responses())
    evil = save(tmp_path / "evil.pt", torch.load(good) | {"metadata": Runs(mark)})
    plain = tmp_path / "plain.pkl"
    plain.write_bytes(pickle.dumps({"samples": [Runs(mark)]}))
    for path in (evil, plain):
        with pytest.raises(BadInput, match="--trust-pickle"):
            everything(path)
        kept, reasons, rows = everything(path, good)  # the other file is still read
        assert (len(kept), reasons, rows) == (12, {"unsafe_pickle": 1}, 12)
        assert not mark.exists()
    assert len(everything(evil, trust_pickle=True)[0]) == 12
    assert mark.exists()


def test_a_shard_of_a_sequence_and_a_rank_that_repeats(tmp_path: Path):
    first = dump_files.write_miles(tmp_path, responses())
    content = torch.load(first)
    shard = save(tmp_path / "4_1.pt", content | {"cp_size": 2, "rank": 1})
    again = save(tmp_path / "4_2.pt", content | {"rank": 2})
    kept, reasons, rows = everything(first, shard, again)
    assert (len(kept), rows) == (12, 24)
    assert reasons == {"lengths_differ": 1, "duplicate": 12}


def test_three_policies_of_miles_and_two_calls_on_one_sample(tmp_path: Path):
    made = responses(3)
    for call in (0, 1):
        samples = [
            {
                "index": r["index"],
                "response_length": len(r["ids"]),
                "train_log_probs": torch.tensor(r["old"]) - 0.25 * call,
                "old_log_probs": torch.tensor(r["old"]),
                "rollout_log_probs": torch.tensor(r["q"]),
                "advantages": torch.zeros(len(r["ids"])),
                "local_loss_mask": torch.tensor(r["mask"], dtype=torch.float),
            }
            for r in made
        ]
        save(tmp_path / f"rank_0_call_{call}.pt", {"rank": 0, "call": call, "samples": samples})
    kept, reasons, _ = everything(tmp_path)
    assert (len(kept), reasons) == (6, Counter())
    for row, response in zip(kept[3:], made, strict=True):
        np.testing.assert_allclose(row["train"], np.array(response["old"]) - 0.25, atol=1e-6)
        np.testing.assert_array_equal(row["old"], np.array(response["old"]))


def test_versions_of_turns_that_differ_are_missing(tmp_path: Path):
    path = dump_files.write_miles(tmp_path, responses(2))
    content = torch.load(path)
    content["rollout_data"]["weight_versions"] = [["3", "4"], ["7"]]
    kept, _, _ = everything(save(path, content))
    assert [set(row["version_rollout"].tolist()) for row in kept] == [{-1}, {7}]


def test_a_sample_weight_is_no_mask(tmp_path: Path):
    path = dump_files.write_nemo(tmp_path, responses(3))
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    for row, weight in zip(rows, (1.0, 0.25, 0.0), strict=True):
        row["sample_loss_mask"] = [weight]
    kept, reasons, _ = everything(write_lines(path, rows))
    counts = [sum(r["mask"]) for r in responses(3)]
    assert [int(row["mask"].sum()) for row in kept] == [counts[0], counts[1], 0]
    assert reasons == {"not_a_mask": 1}


# Damaged files: the rest is still read.


@pytest.mark.parametrize("name", ["canonical json", "nemo-rl", "prime-rl"])
def test_a_line_that_breaks_off_costs_one_row(name: str, tmp_path: Path):
    path = WRITERS[name](tmp_path, responses())
    path.write_bytes(path.read_bytes()[:-40])
    kept, reasons, rows = everything(path)
    assert (len(kept), reasons, rows) == (11, {"truncated_file": 1}, 12)


def test_lines_of_other_kinds_cost_themselves(tmp_path: Path):
    lines = [json.dumps(row) for row in canonical_rows(responses(6))]
    lines[1] = lines[1][:-1]
    lines[2] = "[1, 2]"
    lines[3] = json.dumps({"prompt": "x", "completion": "y"})
    lines[4] = lines[4].replace('"logp_rollout": [', '"logp_rollout": ["-0.5", ')
    path = tmp_path / "mixed.jsonl"
    path.write_text("\n".join(lines) + "\n\n")
    kept, reasons, rows = everything(path)
    assert (len(kept), rows) == (2, 6)
    assert reasons == {"unreadable_row": 1, "mixed_schema": 3}


def test_nan_and_minus_infinity_of_python_json(tmp_path: Path):
    rows = canonical_rows(responses(3))
    rows[0]["logp_train"][0] = -np.inf  # the trainer's weight is 0, which is legal
    rows[0]["mask"][0] = True
    rows[1]["logp_rollout"] = [np.nan] * len(rows[1]["mask"])
    kept, reasons, _ = everything(write_lines(tmp_path / "d.jsonl", rows))
    assert (len(kept), reasons) == (2, {"nonfinite": 1})
    assert kept[0]["train"][0] == -np.inf


@pytest.mark.parametrize("name", WRITERS)
def test_a_file_cut_in_half_is_one_clear_line_or_its_first_half(name: str, tmp_path: Path):
    path = WRITERS[name](tmp_path, responses())
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    good = dump_files.write_json(tmp_path / "good", responses(3))
    kept, reasons, rows = everything(path, good)
    assert reasons["truncated_file"] == 1
    assert len(kept) >= 3
    assert rows >= 3


def test_nothing_to_read_is_one_line(tmp_path: Path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "blank.jsonl").write_text("\n\n")
    (tmp_path / "text.jsonl").write_text("hello\n")
    pl.DataFrame({"step": [1], "prompt": ["x"], "completion": ["y"]}).write_parquet(tmp_path / "trl.parquet")
    for name, told in (
        ("nowhere", "does not exist"),
        ("empty", "holds no dump"),
        ("blank.jsonl", "neither Parquet nor JSON lines"),
        ("text.jsonl", "neither Parquet nor JSON lines"),
        ("trl.parquet", "no log-probabilities under a known name; it has step, prompt, completion"),
    ):
        with pytest.raises(BadInput, match=told) as error:
            everything(tmp_path / name)
        assert "\n" not in str(error.value)


@pytest.mark.parametrize("kind", ["json", "parquet"])
def test_columns_of_several_numbers_a_token(kind: str, tmp_path: Path):
    rng = np.random.default_rng(0)
    rows = canonical_rows(responses(5))
    for row in rows:
        shape = (len(row["logp_rollout"]), 3)
        row |= {name: (-rng.random(shape)).tolist() for name in ("top_rollout", "top_train")}
        row |= {name: rng.random(shape[0]).tolist() for name in ("entropy", "weight")}
    rows[2]["top_train"][0].append(-1.0)
    if kind == "json":
        path = write_lines(tmp_path / "tops.jsonl", rows)
    else:
        path = tmp_path / "tops.parquet"
        pl.DataFrame(rows, schema_overrides={"logp_sync": pl.List(pl.Float64)}).write_parquet(path)
    (chunk,) = read([path])
    assert [(r.sample_id, r.reason) for r in chunk.refused] == [("2", "lengths_differ")]
    for name in ("top_rollout", "top_train", "entropy", "weight"):
        right = np.concatenate([np.array(row[name]) for i, row in enumerate(rows) if i != 2])
        np.testing.assert_array_equal(getattr(chunk.rollouts, name), right)


def test_our_own_run_folder(tmp_path: Path):
    for step in (0, 1):
        pl.DataFrame(canonical_rows(responses(4, seed=step), step + 1)).write_parquet(
            dump_files.save(tmp_path / "rollouts" / f"step-{step:06d}.parquet", 0)
        )
    pl.DataFrame({"step": [0]}).write_parquet(tmp_path / "steps.parquet")
    kept, reasons, _ = everything(tmp_path)
    assert ([row["step"] for row in kept], reasons) == ([1] * 4 + [2] * 4, Counter())
