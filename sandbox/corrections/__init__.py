"""What is done to a batch of off-policy samples: weights, rejections, a centred score, and when to sync the sampler.

Read in this order: `ratios` (log ratios, one line of mathematics each), `rules` (the corrections), `rejections`,
`combinations`, `presets` (every rule by name, those of public frameworks included), `losses`, `resync`. Imports numpy
and array-api-compat only.
"""

from sandbox.corrections import losses, presets, ratios
from sandbox.corrections.combinations import Compose, FiniteOnly
from sandbox.corrections.presets import METRICS, PRESETS, RULES
from sandbox.corrections.rejections import Divergence, OffPolicySequenceMask, ProbabilityBand, Veto
from sandbox.corrections.resync import RESYNCS, EssBelow, EveryK, KlAbove, Never, Resync
from sandbox.corrections.rules import (
    CIS,
    CORRECTIONS,
    DLC,
    Centre,
    Corrected,
    Correction,
    Mask,
    PPOClip,
    TimesEss,
    Truncate,
    Uncorrected,
    in_chunks,
)  # fmt: skip

__all__ = [
    "CIS", "CORRECTIONS", "DLC", "METRICS", "PRESETS", "RESYNCS", "RULES", "Centre", "Compose", "Corrected",
    "Correction", "Divergence", "EssBelow", "EveryK", "FiniteOnly", "KlAbove", "Mask", "Never", "OffPolicySequenceMask",
    "PPOClip", "ProbabilityBand", "Resync", "TimesEss", "Truncate", "Uncorrected", "Veto", "in_chunks", "losses",
    "presets", "ratios",
]  # fmt: skip
