"""The corrections of `sandbox` on a real language model, sampled by vLLM and trained by PyTorch."""

import os

# Read when torch is imported, so set before anything here imports it. OpenMP threads that spin while they wait starve
# each other on a machine that does anything else: a trainer step took five times as long on two shared cores.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
