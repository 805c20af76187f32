"""ESS across ranks: four real processes of torch.distributed (gloo), and two pairs of them, against one process."""

import math
import multiprocessing
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from realmodel.adapters.ranks import global_ess
from sandbox.metrics import ess, ess_standard_error, ess_sums, gathered_ess

INF = math.inf
# What each of four ranks holds. Unequal in number, very unequal in weight; sums of e^(2 x 400) overflow.
CASES = {
    "uneven": ([0.3, -1.2, 0.8], [2.5], [-0.1] * 7, [-3.0, 1.1]),
    "a rank without responses": ([0.3, -1.2], [], [1.7], [-0.4, 0.9, 0.2]),
    "a rank of weight 0": ([0.3, -1.2], [-INF, -INF], [1.7], [-INF, 0.9]),
    "an infinite weight": ([INF, 0.0], [0.1], [], []),
    "far from 1": ([400.0, 398.5], [401.0], [-900.0], [399.0]),
    "far apart": ([-800.0, 0.3], [0.1], [1.2, -900.0, 0.0], [0.0]),
    "all weights 0": ([-INF], [-INF, -INF], [], [-INF]),
    "no response at all": ([], [], [], []),
}


def one_process(parts) -> tuple[float, float]:
    together = np.array([x for part in parts for x in part])
    if not len(together):
        return math.nan, math.nan
    with np.errstate(invalid="ignore"):
        return float(ess(together)), ess_standard_error(together, np.arange(len(together)))


def work(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=4)
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    mine = [torch.tensor(parts[rank], dtype=torch.float32).double() for parts in CASES.values()]
    result = [[global_ess(x), global_ess(x, pairs[rank // 2])] for x in mine]
    torch.save(torch.tensor(result, dtype=torch.float64), f"{folder}/{rank}.pt")
    dist.destroy_process_group()


def test_four_processes_and_two_pairs_equal_one(tmp_path: Path):
    multiprocessing.set_forkserver_preload(["realmodel.adapters.ranks"])  # torch is imported once, not by each
    mp.start_processes(work, (str(tmp_path),), nprocs=4, start_method="forkserver")
    for rank in range(4):
        result = torch.load(tmp_path / f"{rank}.pt").numpy()
        for case, (all_four, pair) in zip(CASES.values(), result, strict=True):
            case = [np.array(part, np.float32).astype(float) for part in case]
            mates = case[:2] if rank < 2 else case[2:]
            assert all_four[0] == pytest.approx(one_process(case)[0], rel=1e-12, abs=0, nan_ok=True)
            assert pair[0] == pytest.approx(one_process(mates)[0], rel=1e-12, abs=0, nan_ok=True)


def test_the_mean_of_the_ranks_own_ess_is_another_number():
    parts = CASES["uneven"]
    own = float(np.mean([ess(np.array(part)) for part in parts]))
    whole = global_ess(torch.tensor([x for part in parts for x in part], dtype=torch.float64))[0]
    weights = [math.exp(x) for part in parts for x in part]
    assert whole == pytest.approx(sum(weights) ** 2 / (13 * sum(w * w for w in weights)), rel=1e-12)
    assert own > 2 * whole


def test_standard_error_is_that_of_responses_taken_as_independent():
    rng = np.random.default_rng(0)
    parts = [rng.normal(0, 0.7, n) for n in (100, 3, 250, 47)]
    together = np.concatenate(parts)
    value, error = gathered_ess(np.stack([ess_sums(part) for part in parts]))
    assert value == pytest.approx(float(ess(together)), rel=1e-12)
    assert error == pytest.approx(ess_standard_error(together, np.arange(len(together))), rel=1e-10)
    assert gathered_ess(ess_sums(np.zeros(8))[None]) == (pytest.approx(1.0, rel=1e-15), pytest.approx(0.0, abs=1e-7))
