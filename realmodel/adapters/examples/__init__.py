"""Configurations to start from: one per framework, and the script that TRL, a library, needs."""
