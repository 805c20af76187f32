"""False verdicts of `mismatch diagnose` on synthetic dumps of known cause: `python -m benchmarks.battery [SEED0]`.

20 causes x 10 seeds, drawn from a tabular state machine by the exact simulator's policies. A verdict is right when the
word is the cause's and the finding that names the cause is among the findings. Thresholds were chosen on seeds from
1000 on; the battery runs on seeds 0 to 9.
"""

import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np

from sandbox import diagnose, policy, problems, rollouts

STEPS, RESPONSES = 12, 24
Rows = list[dict[str, Any]]

# cause: (verdict, the finding that names it; "" where none should)
CAUSES = {
    "healthy": ("healthy", ""),
    "numerics": ("numerics", ""),
    "lag": ("lag", ""),
    "lag, no logp_sync, some of lag 0": ("lag", ""),
    "temperature 0.8": ("semantics", "temperature"),
    "raw log-probs, drawn at 0.7": ("semantics", "raw_logprobs"),
    "top-p 0.9": ("semantics", "truncated_support"),
    "top-k 4": ("semantics", "truncated_support"),
    "shifted by one": ("semantics", "shift"),
    "observation tokens": ("semantics", "observation_tokens"),
    "EOS of 0.0": ("semantics", "placeholder"),
    "padding of -9999": ("semantics", "placeholder"),
    "ids differ": ("semantics", "ids_differ"),
    "negative lag": ("semantics", "negative_lag"),
    "bfloat16": ("numerics", "low_precision_grid"),
    "mixture": ("numerics", "mixture_tail"),
    "growing discrepancy": ("numerics", "discrepancy_not_constant"),
    "hidden staleness": ("hidden_staleness", "hidden_staleness"),
    "old at current weights": ("not_identifiable", "recomputed_old"),
    "reward collapses alone": ("prediction_failed", "prediction_failed"),
}


def dump(cause: str, seed: int) -> Rows:
    """Rows of one dump: STEPS x RESPONSES, of 8 to 48 tokens."""
    rng = np.random.default_rng([seed, list(CAUSES).index(cause)])
    problem = problems.state_machine(rng, 64, 16, 48)
    shape = problem.shape
    start = 1.5 * rng.standard_normal(shape)
    path = start + np.cumsum(0.04 * rng.standard_normal((STEPS + 4, *shape)), axis=0)  # trainer's logits by version
    sd = {"numerics": 0.1, "bfloat16": 0.1}.get(cause, 0.01)
    fixed = sd * rng.standard_normal(shape)
    rows: Rows = []
    for step in range(STEPS):
        now = step + 4
        behind = {"lag": 3, "lag, no logp_sync, some of lag 0": (0, 2, 4)[step % 3], "old at current weights": 2}
        stamped = now - behind.get(cause, 0)
        drawn = stamped - step % 4 if cause == "hidden staleness" else stamped
        offset = fixed
        if cause == "mixture":
            offset = np.where(rng.random(shape) < 0.03, 1.0, 0.003) * rng.standard_normal(shape)
        if cause == "growing discrepancy":
            offset = 0.03 * (1 + step) * rng.standard_normal(shape)
        pi = policy.log_policy(path[now])
        mu = policy.log_policy(path[stamped])
        draws = reported = policy.log_policy(policy.log_policy(path[drawn]) + offset)
        if cause == "temperature 0.8":
            draws = reported = policy.log_policy(draws / 0.8)
        if cause.startswith("raw"):
            draws, mu, pi = (policy.log_policy(x / 0.7) for x in (draws, mu, pi))
        if cause.startswith("top"):
            draws = reported = policy.log_policy(_restricted(draws, cause))
        pairs = policy.draw(problem, draws[None], rng.random((1, RESPONSES, 48)))[0]
        for i, flat in enumerate(pairs):
            n = int(rng.integers(8, 49))
            index = flat[:n][flat[:n] >= 0]
            q, sync, train = (x.ravel()[index] for x in (reported, mu, pi))
            row = {"step": step, "prompt_id": i // 4, "sample_id": i, "version_rollout": stamped, "version_train": now}
            row |= {"logp_rollout": q, "logp_sync": sync, "logp_train": train, "logp_old": train}
            late = cause.startswith("reward") and step >= STEPS // 2
            row |= {"reward": float(rng.random() < (0.05 if late else 0.7)), "advantage": float(rng.standard_normal())}
            _spoil(cause, row, index % shape[1], rng)
            rows.append(row)
    return rows


def _restricted(logp: np.ndarray, cause: str) -> np.ndarray:
    order = np.argsort(-logp, axis=1)
    p = np.take_along_axis(np.exp(logp), order, axis=1)
    keep = (
        np.cumsum(p, axis=1) - p < 0.9 if cause == "top-p 0.9" else np.broadcast_to(np.arange(p.shape[1]) < 4, p.shape)
    )
    kept = np.zeros(logp.shape, bool)
    np.put_along_axis(kept, order, keep, axis=1)
    return np.where(kept, logp, -1e9)


def _spoil(cause: str, row: dict[str, Any], ids: np.ndarray, rng: np.random.Generator) -> None:
    """What a defect of the writer does to one row."""
    q, sync, train = row["logp_rollout"], row["logp_sync"], row["logp_train"]
    n = len(q)
    if cause == "lag, no logp_sync, some of lag 0":
        del row["logp_sync"], row["logp_old"]
    elif cause == "shifted by one":
        for name in ("logp_sync", "logp_train", "logp_old"):
            row[name] = np.append(row[name][1:], -0.7)
    elif cause == "observation tokens":
        at = slice(n // 2, n // 2 + 3)
        far = -3 - 4 * rng.random(3)
        for x, value in ((q, 0.0), (sync, far), (train, far)):
            x[at] = value
    elif cause == "EOS of 0.0":
        q[-1], sync[-1], train[-1] = 0.0, -4.6, -4.6
    elif cause == "padding of -9999":
        q[rng.integers(n)] = -9999.0
    elif cause == "ids differ":
        theirs = ids.copy()
        theirs[n // 2] = (theirs[n // 2] + 1) % 16
        row |= {"token_ids": ids, "trainer_token_ids": theirs}
        row["logp_train"] = row["logp_sync"] = np.where(np.arange(n) >= n // 2, train - 1, train)
    elif cause == "negative lag" and rng.random() < 0.3:
        row["version_rollout"] = row["version_train"] + 1
    elif cause == "bfloat16":
        row["logp_rollout"] = bfloat16(q)
    elif cause == "old at current weights":
        del row["logp_sync"]


def bfloat16(x: np.ndarray) -> np.ndarray:
    """Rounded to the nearest bfloat16."""
    bits = x.astype(np.float32).view(np.uint32)
    return ((bits + 0x8000) & np.uint32(0xFFFF0000)).view(np.float32).astype(np.float64)


def judged(rows: Rows, cause: str) -> tuple[str, bool, list[str]]:
    """Verdict, whether it and the naming finding are right, the codes found."""
    outcome = diagnose.diagnose(rollouts.collect(rows))
    codes = [f["code"] for f in outcome["findings"]]
    word, code = CAUSES[cause]
    return outcome["verdict"], outcome["verdict"] == word and (not code or code in codes), codes


def confusion(seeds: range, show: Callable[[str], object] = print) -> tuple[int, int]:
    """Print the matrix; (wrong, all)."""
    wrong = 0
    show(f"{'cause':34} {'expected':18} verdicts of {len(seeds)} seeds")
    for cause, (word, code) in CAUSES.items():
        results = [judged(dump(cause, seed), cause) for seed in seeds]
        bad = [r for r in results if not r[1]]
        wrong += len(bad)
        counts = ", ".join(f"{v} {n}" for v, n in Counter(r[0] for r in results).items())
        missed = f"   wrong {len(bad)}, e.g. {bad[0][2]}" if bad else ""
        show(f"{cause:34} {word:18} {counts}{f'; {code}' if code else ''}{missed}")
    total = len(CAUSES) * len(seeds)
    show(f"false verdicts: {wrong} of {total} ({wrong / total:.1%})")
    return wrong, total


if __name__ == "__main__":
    first = int(sys.argv[1]) if len(sys.argv) > 1 else 0
    confusion(range(first, first + 10))
