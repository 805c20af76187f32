"""False verdicts of `mismatch diagnose` on synthetic dumps of known cause: `python -m benchmarks.battery [SEED0]`.

All causes of benchmarks.synthetic x 10 seeds, drawn from a tabular state machine by the exact simulator's policies. A
verdict is right when the word is the cause's and the finding that names the cause is among the findings.
"""

import sys
from collections import Counter
from collections.abc import Callable

from benchmarks import synthetic
from sandbox.diagnosis.diagnose import diagnose


def judged(cause: str, seed: int) -> tuple[str, bool, list[str]]:
    """Verdict, whether it and the naming finding are right, the codes found."""
    outcome = diagnose([synthetic.chunk(synthetic.rows(cause, seed))])
    codes = [finding["code"] for finding in outcome["findings"]]
    asked = synthetic.CAUSES[cause]
    return outcome["verdict"], outcome["verdict"] == asked.verdict and asked.code in (*codes, ""), codes


def confusion(seeds: range, show: Callable[..., object] = print) -> tuple[int, int]:
    """Print the matrix; (wrong, all)."""
    wrong = 0
    show(f"{'cause':30} {'expected':18} verdicts of seeds {seeds.start} to {seeds.stop - 1}; the finding that names it")
    for cause, asked in synthetic.CAUSES.items():
        results = {seed: judged(cause, seed) for seed in seeds}
        bad = {seed: result for seed, result in results.items() if not result[1]}
        wrong += len(bad)
        counts = ", ".join(f"{v} {n}" for v, n in Counter(r[0] for r in results.values()).most_common())
        missed = f"   WRONG {len(bad)}: {[(s, r[0], *r[2]) for s, r in bad.items()][:3]}" if bad else ""
        show(f"{cause:30} {asked.verdict:18} {counts}; {asked.code or '-'}{missed}")
    total = len(synthetic.CAUSES) * len(seeds)
    show(f"false verdicts: {wrong} of {total} ({wrong / total:.1%})")
    return wrong, total


if __name__ == "__main__":
    first = int(sys.argv[1]) if len(sys.argv) > 1 else 500
    confusion(range(first, first + 10))
