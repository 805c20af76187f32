"""The same corrections inside other trainers: verl, TRL, prime-rl, slime. README.md says how to use them.

Each module is thin. It maps the tensors of one framework to `sandbox.batch.Batch` and returns what the hook of that
framework expects. Nothing else here imports them, so you need only the framework that you use.
"""
