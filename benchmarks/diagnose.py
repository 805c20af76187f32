"""`mismatch diagnose` on 10 M tokens of Parquet: seconds and peak memory of the whole process. JSON lines: how many
times longer they take to read and check than msgspec alone takes to parse them, in one run.
"""

import subprocess
import sys
import tempfile
import time
from pathlib import Path

import msgspec
import numpy as np
import polars as pl

from benchmarks.clock import best
from realmodel.dumps.readers import read
from sandbox.diagnosis.diagnose import diagnose

TOKENS, LENGTH, BUDGET = 10_000_000, 1000, (20.0, 2.0)  # seconds, GiB
LINES = 5_000  # responses of the JSON file
# The peak is the kernel's VmHWM: ru_maxrss of a child starts at that of the parent, which made the table.
PEAK = "; print(open('/proc/self/status').read().split('VmHWM:')[1].split()[0], file=sys.stderr)"
READ = (
    "import sys; from pathlib import Path; from realmodel.dumps.readers import read;"
    " [0 for _ in read([Path(sys.argv[1])])]"
)
DIAGNOSE = "import sys; from realmodel.cli import main; sys.argv[1:] = ['diagnose', sys.argv[1], '--json']; main()"


def dump(n: int, seed: int = 0) -> pl.DataFrame:
    """n responses of about LENGTH tokens at lag 1: q, mu = q + numerics, pi = mu + lag."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(LENGTH // 2, LENGTH * 3 // 2, size=n)
    total = int(lengths.sum())
    q = -(rng.exponential(size=total) ** 1.5) - 1e-7
    mu = np.minimum(q + 0.01 * rng.normal(size=total) * np.sqrt(-q), -1e-7)
    pi = np.minimum(mu + 0.03 * rng.normal(size=total) * np.sqrt(-q), -1e-7)
    row = pl.Series(np.repeat(np.arange(n), lengths))
    columns = {
        "mask": rng.random(total) < 0.9,
        "logp_rollout": q,
        "logp_sync": mu,
        "logp_train": pi,
        "token_ids": rng.integers(0, 150_000, total),
    }
    ragged = pl.DataFrame({"row": row, **columns}).group_by("row", maintain_order=True).agg(pl.all()).drop("row")
    step = np.arange(n) * 100 // n
    scalars = {"step": step, "prompt_id": np.arange(n) // 8, "sample_id": np.arange(n), "version_train": step + 1}
    scalars |= {"version_rollout": step, "reward": rng.random(n), "advantage": rng.normal(size=n)}
    return ragged.with_columns(**{name: pl.Series(values) for name, values in scalars.items()})


def measured(code: str, path: Path) -> tuple[float, float]:
    """Wall seconds and peak GiB of a process."""
    start = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", code + PEAK, str(path)], check=True, capture_output=True, text=True)
    return time.perf_counter() - start, int(done.stderr.split()[-1]) / 2**20


def json_seconds(path: Path) -> tuple[float, float, float]:
    """Seconds of the processor to diagnose JSON lines, to read and check them, to parse them with msgspec alone."""

    def parse() -> None:
        with path.open("rb") as file:
            for line in file:
                msgspec.json.decode(line)

    def ours() -> None:
        for _ in read([path]):
            pass

    whole, reading, parser = (
        best(work, 3, time.process_time) for work in (lambda: diagnose(read([path])), ours, parse)
    )
    return whole, reading, parser


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        table, lines = Path(folder) / "dump.parquet", Path(folder) / "dump.jsonl"
        dump(TOKENS // LENGTH).write_parquet(table)
        dump(LINES, seed=1).write_ndjson(lines)
        whole, reading, parser = json_seconds(lines)
        print(f"JSON lines ({LINES * LENGTH:,} tokens) over msgspec alone; at most 3:")
        print(f"  read and checked {reading / parser:.2f}, diagnosed {whole / parser:.2f}")
        size = table.stat().st_size / 2**20
        print(
            f"{TOKENS:,} tokens of Parquet ({size:.0f} MiB), whole process; at most {BUDGET[0]:.0f} s, {BUDGET[1]} GiB"
        )
        for name, code in {"reading and checking": READ, "mismatch diagnose --json": DIAGNOSE}.items():
            seconds, memory = measured(code, table)
            print(f"  {name:26}{seconds:6.1f} s {memory:6.2f} GiB")


if __name__ == "__main__":
    main()
