"""What reading and diagnosing a dump costs: `python -m benchmarks.diagnose [TOKENS]`; each part is a process.

Parquet: seconds and peak memory of the whole command. JSON lines: seconds over those of the parser alone.
"""

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import polars as pl

LENGTH = 500  # tokens a response, on average


def table(tokens: int, seed: int) -> pl.DataFrame:
    rng = np.random.default_rng(seed)
    n = tokens // LENGTH
    lengths = rng.integers(LENGTH // 2, 3 * LENGTH // 2, n)
    ends = np.cumsum(lengths)
    q = -rng.exponential(0.5, ends[-1])
    mu = np.minimum(q + 0.01 * rng.standard_normal(len(q)), 0)
    pi = np.minimum(mu + 0.01 * rng.standard_normal(len(q)), 0)
    lists = {"logp_rollout": q, "logp_sync": mu, "logp_train": pi, "mask": np.ones(len(q), bool)}
    step = np.arange(n) // 256 + seed * 1000
    return pl.DataFrame(
        {"step": step, "prompt_id": np.arange(n) // 8, "sample_id": np.arange(n)}
        | {name: pl.Series(np.split(x, ends[:-1])) for name, x in lists.items()}
        | {"version_rollout": step, "version_train": step + 1, "reward": rng.random(n)}
    )


def main(tokens: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        parquet, lines = Path(folder, "a.parquet"), Path(folder, "a.jsonl")
        table(tokens, 0).write_parquet(parquet)
        table(tokens // 10, 0).write_ndjson(lines)
        for path in (parquet, lines):
            command = [sys.executable, "-m", "benchmarks.diagnose", "measure", str(path)]
            print(subprocess.run(command, check=True, capture_output=True, text=True).stdout, end="")


def measure(path: Path) -> None:
    from realmodel import diagnosis

    start = time.perf_counter()
    outcome, _ = diagnosis.run((path,), None, (), None, False)
    seconds = time.perf_counter() - start
    # not ru_maxrss, which a child inherits from the parent that made the table
    peak = int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) / 2**20
    print(f"{path.suffix}: {outcome['n_tokens']} tokens, {seconds:.1f} s, peak {peak:.2f} GiB")
    if path.suffix == ".jsonl":
        start = time.perf_counter()
        with path.open("rb") as opened:
            for line in opened:
                json.loads(line)
        print(f"{path.suffix}: over the parser alone {seconds / (time.perf_counter() - start):.2f}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["measure"]:
        measure(Path(sys.argv[2]))
    else:
        main(int(sys.argv[1]) if len(sys.argv) > 1 else 10_000_000)
