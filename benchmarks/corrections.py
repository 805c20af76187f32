"""Corrections and diagnostics on a training-size batch, in passes of one element-wise addition of the same run."""

import contextlib
import ctypes
import resource
import threading
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from benchmarks import straightforward
from benchmarks.clock import best
from sandbox.batch import Batch
from sandbox.corrections import DLC, PRESETS, Corrected, in_chunks, losses
from sandbox.metrics import Report, report, summary


def batch_of(rows: int, width: int) -> Batch:
    """float32 responses of unequal length; lag sd .01, discrepancy sd .02 per token."""
    rng = np.random.default_rng(0)
    noise = torch.Generator().manual_seed(0)
    q = torch.tensor(-rng.exponential(size=(rows, width)), dtype=torch.float32)
    mu = torch.minimum(q + 0.02 * torch.randn(q.shape, generator=noise), q * 0)
    pi = torch.minimum(mu + 0.01 * torch.randn(q.shape, generator=noise), q * 0)
    mask = torch.arange(width) < torch.tensor(rng.integers(width // 4, width + 1, size=(rows, 1)))
    return Batch(pi, q, mask, torch.ones(rows, 1), mu)


def peak_megabytes(work: Callable[[], object]) -> float:
    """How far the process's memory rises while `work` runs, looked at every .2 ms (Linux; nan elsewhere)."""
    status = Path("/proc/self/statm")
    if not status.exists():
        return float("nan")
    seen: list[int] = []
    done = threading.Event()

    def watch() -> None:
        while not done.is_set():
            seen.append(int(status.read_text().split()[1]))
            time.sleep(2e-4)

    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)  # what earlier work freed must not be reused unseen
    thread = threading.Thread(target=watch)
    thread.start()
    time.sleep(0.01)
    work()
    done.set()
    thread.join()
    return (max(seen) - seen[0]) * resource.getpagesize() / 2**20


@dataclass
class Fused:
    """Token TIS weights and the sums of the report as one compiled pass over some rows at a time.

    `summarise` asks for the sums of each chunk; the weights that come with them go where they belong.
    """

    tokens: int = 64 * 4096

    def __post_init__(self) -> None:
        def both(batch: Batch) -> tuple[Tensor, tuple]:
            weight, keep, _ = PRESETS["tis"](batch)
            return weight, summary.token_sums(batch, weight, keep)

        self.both = torch.compile(both, fullgraph=True, dynamic=False)

    def __call__(self, batch: Batch) -> tuple[Corrected, Report]:
        corrected = Corrected(torch.empty_like(batch.logp_train), batch.mask, 0.0)  # TIS rejects nothing

        def sums(piece: Batch, weight: Tensor, keep: Tensor) -> tuple:
            fresh, told = self.both(piece)
            weight.copy_(fresh)
            return told

        return corrected, report(summary.summarise(batch, corrected, sums, self.tokens))


def main() -> None:
    batch = batch_of(512, 4096)
    addition = best(lambda: batch.logp_train + batch.logp_rollout, 20)
    megabytes = batch.logp_train.nbytes / 2**20
    print(f"corrections on [512, 4096] float32, in passes of one addition ({addition * 1e3:.2f} ms): whole, in chunks")
    for name in (
        "none",
        "tis",
        "seq_tis",
        "icepop",
        "ppo",
        "cis",
        "gspo",
        "dppo",
        "opsm",
        "verl.decoupled_seq_is_rs",
    ):
        rule = PRESETS[name]
        whole, chunked = (
            best(work, 3) / addition for work in (lambda r=rule: r(batch), lambda r=rule: in_chunks(r, batch))
        )
        print(f"  {name:30} {whole:6.1f} {chunked:6.1f}")

    def eager() -> tuple[Corrected, Report]:
        corrected = in_chunks(PRESETS["tis"], batch)
        return corrected, report(batch, corrected)

    def plain() -> tuple[Tensor, dict]:
        sync: Tensor = batch.need("logp_sync")
        return straightforward.metrics(batch.logp_train, batch.logp_rollout, sync, batch.mask)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.compile on cached functions of array-api-compat
        fused = Fused()
        agree(fused(batch)[1], plain()[1])
        agree(eager()[1], plain()[1])
        rounds = [(best(plain, 1), best(eager, 2), best(lambda: fused(batch), 4)) for _ in range(4)]
    slow, ours, fast = (min(x) for x in zip(*rounds, strict=True))
    addition = min(addition, best(lambda: batch.logp_train + batch.logp_rollout, 20))
    print("token TIS weights and the full report:  ms, passes of one addition, times faster, peak memory in arrays")
    for name, seconds, work in (
        ("straightforward eager torch", slow, plain),
        ("in chunks", ours, eager),
        ("compiled", fast, lambda: fused(batch)),
    ):
        arrays = peak_megabytes(work) / megabytes
        print(f"  {name:30} {seconds * 1e3:7.1f} {seconds / addition:7.1f} {slow / seconds:6.1f} {arrays:6.1f}")


def agree(report: Report, plain: dict) -> None:
    """The two say the same, or the comparison is void."""
    pairs = {
        "ess_sequence": report.ess["sequence"].raw,
        "ess_token": report.ess["token"].raw,
        "k_token": report.ess["token"].pareto_k,
        "k_sequence": report.ess["sequence"].pareto_k,
        "k3": report.kl_sampler_train["k3"],
        "top_share_token": report.tails.top_share_token,
        "kurtosis": report.tails.kurtosis,
        "perplexity_ratio": report.perplexity["ratio"],
        "applied_ess": report.applied.ess if report.applied else None,
    }
    for name, value in pairs.items():
        np.testing.assert_allclose(value, plain[name], rtol=2e-3, atol=2e-3, err_msg=name)
    np.testing.assert_allclose(report.by_probability.mean_square, plain["probability_square"], rtol=1e-3)
    np.testing.assert_allclose(report.by_position.mean_square, plain["position_square"], rtol=1e-3)


def top_k(tokens: int = 8 * 1024, vocabulary: int = 151_936, k: int = 64, slab: int = 256) -> None:
    """DLC's centring of [8, 1024] tokens against the log-softmax it rides on, one slab of tokens at a time."""
    logits = torch.randn(slab, vocabulary, generator=torch.Generator().manual_seed(0))
    softmax = best(lambda: logits.log_softmax(-1), 5) * tokens / slab
    whole = logits.log_softmax(-1)
    top = whole.topk(k, dim=-1).indices
    gather = best(lambda: whole.gather(-1, top), 5) * tokens / slab
    columns = whole.gather(-1, top).repeat(tokens // slab, 1).reshape(8, -1, k)
    drawn = columns[..., 0]
    mask = torch.ones(drawn.shape, dtype=torch.bool)
    batch = Batch(
        drawn, drawn - 0.01, mask, torch.ones(8, 1), drawn,
        logp_train_all=columns, logp_sync_all=columns - 0.01, logp_rollout_all=columns + 0.01,
    )  # fmt: skip
    rule = DLC()
    plain = Corrected(torch.ones(8, 1), mask, 0.0)
    centred = best(lambda: losses.reinforce(batch, rule(batch)), 5)
    uncentred = best(lambda: losses.reinforce(batch, plain), 5)
    extra = gather + centred - uncentred
    print(
        f"DLC with top-{k} centring of [8, 1024] tokens, V = {vocabulary:,}: {extra * 1e3:.1f} ms, "
        f"{100 * extra / softmax:.2f} % of the log-softmax ({softmax * 1e3:.0f} ms)"
    )
