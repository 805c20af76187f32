"""The corrections of `sandbox` on a real language model, sampled by vLLM and trained by PyTorch."""

import os

# Read when torch is imported, so set before anything here imports it. OpenMP threads that spin while they wait starve
# each other on a machine that does anything else: by default a trainer step took ten times as long beside one busy
# process on two cores. Not spinning at all costs it 40 % where nothing else runs; this many turns cost either little.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "5000")
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
