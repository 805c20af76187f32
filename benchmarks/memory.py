"""Peak memory of log-probabilities at Qwen3's vocabulary: `python -m benchmarks.memory`, forward and backward.

A process of its own makes hidden states and the output matrix, notes its resident size, then computes the
log-probabilities and their gradients; printed is how far the peak rose above that baseline. What must be in it: the
gradient of the matrix (593 MiB in float32 at V = 151,936, H = 1,024), which any way of training has.

Two traps: ru_maxrss survives exec, so a child starts at its parent's peak (VmHWM does not); and a temporary made on the
way to the baseline would hide as much of what follows, so the arrays are filled in place and the baseline is VmRSS.
"""

import subprocess
import sys

CODE = """
import sys, torch
from realmodel.policy.logprobs import _Columns
def mib(name):
    return next(int(l.split()[1]) for l in open('/proc/self/status') if l.startswith(name)) / 1024
vocabulary, hidden, rows, chunk_mib, plain = (float(a) for a in sys.argv[1:])
matrix = torch.empty(int(vocabulary), int(hidden)).normal_(0, 0.02).requires_grad_()
states = torch.empty(int(rows), int(hidden)).normal_().requires_grad_()
columns = torch.randint(int(vocabulary), (int(rows), 1))
step = max(1, int(chunk_mib * 2**20 / (4 * vocabulary)))
warm = torch.randn(64, int(hidden)) @ torch.randn(int(hidden), 64)  # the kernels' own workspace
baseline = mib('VmRSS')
if plain:
    (states @ matrix.T).log_softmax(-1).gather(-1, columns).sum().backward()
else:
    _Columns.apply(states, matrix, columns, step).sum().backward()
print(mib('VmHWM') - baseline)
"""


def peak_mib(vocabulary: int, hidden: int, rows: int, chunk_mib: float, plain: bool = False) -> float:
    """MiB that the peak resident size of a process rises by; `plain` for the whole table at once."""
    arguments = map(str, (vocabulary, hidden, rows, chunk_mib, int(plain)))
    done = subprocess.run([sys.executable, "-c", CODE, *arguments], capture_output=True, text=True, check=True)
    return float(done.stdout)


def main() -> None:
    """[8, 1024] tokens at Qwen3-0.6B's output layer in chunks, and the plain way on a sixteenth of them."""
    from realmodel.policy.logprobs import CHUNK_MIB

    chunked = peak_mib(151_936, 1024, 8 * 1024, CHUNK_MIB)
    print("log-probabilities of [8, 1024] tokens, V = 151,936, H = 1,024, float32, forward and backward: ", end="")
    print(f"{chunked / 1024:.2f} GiB in chunks of {CHUNK_MIB} MiB (1.5 wanted)")
    plain = peak_mib(151_936, 1024, 512, CHUNK_MIB, plain=True)
    print(f"the whole table at once, 512 tokens only: {plain / 1024:.2f} GiB")


if __name__ == "__main__":
    main()
