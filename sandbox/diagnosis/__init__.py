"""What a dump of rollouts says of its run: numerics, lag, or a bug.

The data goes `dumps` (files to tables) -> `refusals` (what must not be used) -> `rollouts` (the canonical table) ->
`evidence` (sums and a sample of tokens) -> the tests (`alignment`, `semantics`, `attribution`, `drift`, `judgement`,
`ranking`) -> `diagnose` (verdict and advice).
"""

__all__ = [
    "alignment",
    "attribution",
    "diagnose",
    "drift",
    "dumps",
    "evidence",
    "judgement",
    "ranking",
    "refusals",
    "rollouts",
    "semantics",
]
