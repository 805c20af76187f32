"""The corrections of `sandbox` on a real language model, sampled by vLLM and trained by PyTorch."""
