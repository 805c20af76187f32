"""Rules by name, and which of them a framework's hook can express."""

import functools
import json
from typing import Any

import torch
from torch import Tensor

from sandbox.batch import Batch
from sandbox.corrections import Compose, Corrected, Correction, FiniteOnly, Truncate
from sandbox.errors import BadInput
from sandbox.output import config


def named(text: str, kind: type) -> Any:
    """The Correction or Resync that a string in somebody's config means: `dlc`, or JSON, `{"preset": "dlc", "cap": 3}`.

    Raises BadInput for an unknown name or key.
    """
    if not text.lstrip().startswith("{"):
        return config.preset(text, kind)
    try:
        return config.structure(json.loads(text), kind)
    except json.JSONDecodeError as error:
        raise BadInput(f"{kind.__name__.lower()} {text!r} is not JSON: {error}") from error


def applied(batch: Batch, corrected: Corrected) -> Tensor:
    """Weight of every token, 0 where rejected or masked: for hooks that take weights and keep their mask. (B, T)"""
    return torch.where(batch.mask & corrected.keep, corrected.weight, 0.0)


def refuse(rule: Correction, name: str, hook: str, sees_batch: bool = False, sees_advantage: bool = True) -> None:
    """Raises BadInput where a hook lacks what the rule needs; no hook here sees more than the drawn tokens."""
    if rule.centres:
        raise BadInput(f"{name} centres the score over the vocabulary, and {hook} sees only the drawn tokens")
    if normalises(rule) and not sees_batch:
        raise BadInput(f"{name} divides by a mean over the batch, and {hook} sees only a part of it")
    if not sees_advantage and needs_advantage(rule):
        raise BadInput(f"{name} looks at the advantage, which {hook} is not given")


@functools.cache
def allowed(name: str, hook: str, sees_batch: bool = False, sees_advantage: bool = True) -> Correction:
    """The correction of that name, once it is known that the hook can express it; looked up once, not at every call.

    Raises BadInput as `named` and `refuse` do.
    """
    rule = named(name, Correction)
    refuse(rule, name, hook, sees_batch, sees_advantage)
    return rule


def normalises(rule: Correction) -> bool:
    """Whether the rule divides by the mean weight of the batch."""
    if isinstance(rule, Compose):
        return any(map(normalises, rule.rules))
    if isinstance(rule, FiniteOnly):
        return normalises(rule.rule)
    return isinstance(rule, Truncate) and rule.normalise


@functools.cache
def needs_advantage(rule: Correction) -> bool:
    """Whether the rule does another thing for A > 0 than for A < 0 where pi = mu = old, whatever q is."""
    q = torch.linspace(-30, -1e-3, 64)[:, None]
    pi = q.flip(0)

    def used(sign: float) -> Tensor:
        batch = Batch(pi, q, torch.ones_like(q, dtype=torch.bool), torch.full_like(q, sign), pi, pi)
        return applied(batch, rule(batch))

    return not torch.equal(used(1.0), used(-1.0))
