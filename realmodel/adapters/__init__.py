"""The same corrections inside other people's trainers: verl, TRL, prime-rl, slime. README.md is the how-to.

Each module is thin: it maps one framework's tensors to `sandbox.batch.Batch` and returns what that framework's hook
expects. None is imported by anything else here, so nobody needs a framework that he does not use.
"""
