"""Is the discrepancy constant, and is there drift where the dump declares no lag: hidden staleness.

A drift of weights is told from numerics by its shape: it grows and is reset, or it is in some responses of a step and
not in others. Both compare tokens with tokens as surprising, because engines differ most where the policy is unsure.
"""

import math
from itertools import pairwise

import numpy as np
from scipy import stats

from sandbox.diagnosis.evidence import Evidence, Finding, Reference, Sample, mean_and_error

FLOOR = 1e-14  # nats^2; float64 log-probabilities of one computation differ by less
CERTAIN = 0.02  # nats; a token with -log q below it says nothing of a drift


def drift(evidence: Evidence, ref: Reference) -> tuple[dict, list[Finding]]:
    """The profile of `_constancy`, and what it and `_hidden_staleness` find; nothing without a reference."""
    if ref.basis == "logp_train":
        return {}, []
    informative, relative = _relative(ref)
    hidden = _hidden_staleness(evidence, ref, *row_levels(ref, informative, relative))
    profile, varying = _constancy(evidence, ref, informative, relative)
    return profile, [finding for finding in (hidden, varying) if finding is not None]


def _constancy(
    evidence: Evidence, ref: Reference, informative: np.ndarray, relative: np.ndarray
) -> tuple[dict, Finding | None]:
    """Is d constant against step, position, length, entropy (where the dump has it), surprise (-log q) and rank?

    The mean square in the lowest and the highest fifth of each axis, capped at the 99th percentile so that a few tokens
    decide nothing; but for surprise and entropy, relative to tokens as surprising. Against those two it is that of
    d / (1 - p), the error of a logit: d itself vanishes wherever the policy is sure, whatever the engine. Errors take
    responses as clusters.
    """
    tokens, d = ref.tokens, ref.d
    if len(d) < 200 or len(np.unique(tokens.response)) < 20:
        return {}, None
    squares = (d / np.maximum(ref.doubt, CERTAIN)) ** 2
    axes = {
        "step": evidence.responses["step"][tokens.response],
        "position": tokens.position.astype(float),
        "length": evidence.responses["length"][tokens.response].astype(float),
        "entropy": tokens.entropy,
        "surprise": -tokens.rollout,
        "rank": evidence.responses["rank"][tokens.response],
    }
    profile, varying = {}, []
    for name, value in axes.items():
        known = ~np.isnan(value) & ((value >= 0) | (name != "step"))
        known &= informative
        if len(np.unique(value[known])) < 2:
            continue
        row = _ends(tokens, squares if name in ("surprise", "entropy") else relative, d, value, known, name == "rank")
        if row is None:
            continue
        profile[name] = row
        if row["varies"]:
            varying.append(name)
    if not varying:
        return profile, None
    parts = [f"{name} (x {profile[name]['ratio_of_mean_squares']:.2g})" for name in varying]
    message = f"the discrepancy is not constant: its mean square changes with {', '.join(parts)}. Do not subtract a"
    message += " constant: " + " ".join(HINTS[name] for name in varying)
    severity = "info" if {*varying} <= {"surprise", "entropy"} else "warning"
    return profile, Finding("discrepancy_not_constant", severity, message, {name: profile[name] for name in varying})


HINTS = {
    "step": "growth over training is LoRA merging, or precision that the sharper policy outgrows.",
    "position": "growth along the response is the kernels' or the cache's.",
    "length": "long responses take other kernels (split-k, cascade attention).",
    "entropy": "an error of logits that grows with the entropy is no constant offset of them.",
    "surprise": "unlikely tokens differ more, as with bfloat16 logits.",
    "rank": "one worker's engine differs: hardware, kernels, or weights that never arrived.",
}


def _ends(
    tokens: Sample, squares: np.ndarray, d: np.ndarray, value: np.ndarray, known: np.ndarray, categories: bool
) -> dict | None:
    """Mean square of d in the lowest and the highest fifth of `value`; of categories, in the mildest and the worst."""
    squares = np.minimum(squares, np.quantile(squares[known], 0.99))
    if categories:
        names = np.unique(value[known])
        level = [squares[known & (value == name)].mean() for name in names]
        low, high = (known & (value == names[pick(level)]) for pick in (np.argmin, np.argmax))
        if len(names) < 2 or level[int(np.argmin(level))] == level[int(np.argmax(level))]:
            return None
    else:
        edges = np.quantile(value[known], [0.2, 0.8])
        low, high = known & (value <= edges[0]), known & (value >= edges[1])
        if edges[0] == edges[1]:  # most tokens have one value: against the lower ones, or else the higher
            low, high = known & (value < edges[0]), known & (value >= edges[0])
            if not low.any():
                low, high = known & (value == edges[0]), known & (value > edges[0])
    ends, errors, means, mean_errors = [], [], [], []
    for part in (low, high):
        some = tokens.where(part)
        for values, to, noise in ((squares, ends, errors), (d, means, mean_errors)):
            mean, error = mean_and_error(some, values[part])
            to.append(mean)
            noise.append(error)
    ratio = (ends[1] + FLOOR) / (ends[0] + FLOOR)
    error = math.hypot(*(e / (m + FLOOR) for e, m in zip(errors, ends, strict=True)))
    rms = math.sqrt(squares.mean())
    moved = abs(means[1] - means[0])
    varies = (abs(math.log(ratio)) > math.log(3) and abs(math.log(ratio)) > 4 * error) or (
        moved > rms and moved > 5 * math.hypot(*mean_errors)
    )
    return {
        "mean_square_low_fifth": ends[0],
        "mean_square_high_fifth": ends[1],
        "mean_low_fifth_nats": means[0],
        "mean_high_fifth_nats": means[1],
        "ratio_of_mean_squares": ratio,
        "n_tokens": int(low.sum() + high.sum()),
        "varies": bool(varies),
    }


def _relative(ref: Reference) -> tuple[np.ndarray, np.ndarray]:
    """Which tokens can show a drift (not certain ones), and d^2 relative to tokens as surprising, nats^2. (m,)"""
    surprise, squares = -ref.tokens.rollout, ref.d**2 + FLOOR
    informative = surprise > CERTAIN
    some = np.flatnonzero(informative)
    if not len(some):
        return informative, squares
    bins = np.searchsorted(np.quantile(surprise[some], np.linspace(0.05, 0.95, 19)), surprise[some])
    order = np.lexsort((squares[some], bins))
    counts = np.bincount(bins, minlength=20)
    middle = np.minimum(np.cumsum(counts) - counts + counts // 2, len(some) - 1)
    typical = squares[some][order][middle]
    relative = squares.copy()
    relative[some] = squares[some] / typical[bins] * np.median(squares[some])
    return informative, relative


def row_levels(
    ref: Reference, informative: np.ndarray, relative: np.ndarray, least: int = 8
) -> tuple[np.ndarray, np.ndarray]:
    """Responses, and log of the median d^2 of each relative to that of tokens as surprising as its own.

    A few wild tokens do not move it, nor do easy responses: tokens that were certain say nothing of a drift, and
    what is said twice in a response counts once. Responses with fewer than `least` tokens left are left out.
    (m,), (m,) of the m tokens of `ref` -> (n,), (n,)
    """
    keep = np.flatnonzero(informative)
    if not len(keep):
        return np.zeros(0, int), np.zeros(0)
    # a stable sort by one number of d and q within a response: equal pairs become neighbours
    response, pair = ref.tokens.response[keep], ref.tokens.rollout[keep] + np.pi * ref.d[keep]
    order = np.lexsort((pair, response))
    again = (np.diff(response[order], prepend=-1) == 0) & (np.diff(pair[order], prepend=np.nan) == 0)
    keep = keep[order[~again]]
    response, squares = ref.tokens.response[keep], relative[keep]
    which, index, counts = np.unique(response, return_inverse=True, return_counts=True)
    middle = squares[np.lexsort((squares, index))][np.cumsum(counts) - counts + counts // 2]
    enough = counts >= least
    return which[enough], np.log(middle[enough])


def _hidden_staleness(evidence: Evidence, ref: Reference, which: np.ndarray, level: np.ndarray) -> Finding | None:
    """Drift where there should be none, at declared lag 0 or in logp_sync: growing and reset again, or in some rows."""
    if len(which) < 16:
        return None
    return _sawtooth(evidence.responses["step"][which], level, ref) or _stale_rows(evidence, ref, which, level)


def _sawtooth(step: np.ndarray, level: np.ndarray, ref: Reference) -> Finding | None:
    steps = np.unique(step[step >= 0])
    rows = [level[step == one] for one in steps]
    if len(steps) < 5 or min(map(len, rows)) < 3:
        return None
    height = np.array([np.median(row) for row in rows])
    noise = np.array([1.25 * 1.48 * np.median(np.abs(row - np.median(row))) / math.sqrt(len(row)) for row in rows])
    need = np.maximum(math.log(3), 5 * np.hypot(noise[1:], noise[:-1]))
    clean = height[1:] < height.min() + math.log(2)  # a sync takes all of a lag away
    resets = np.flatnonzero((np.diff(height) < -need) & clean) + 1
    grown = 0
    bounds = [0, *resets.tolist(), len(steps)]
    for start, stop in pairwise(bounds):
        rise = height[start:stop]
        if len(rise) >= 2 and rise[-1] - rise[0] > math.log(2):
            grown += len(rise) == 2 or np.corrcoef(np.arange(len(rise)), rise)[0, 1] > 0.7
    if not len(resets) or grown < 2:
        return None
    numbers = {
        "resets_at_step": [int(steps[i]) for i in resets],
        "rms_before_reset_nats": float(np.exp(np.median(height[resets - 1]) / 2)),
        "rms_after_reset_nats": float(np.exp(np.median(height[resets]) / 2)),
        "n_steps": len(steps),
        "n_responses": len(step),
        "basis": ref.basis,
    }
    message = "hidden staleness: the lag is declared 0, but the mismatch grows from step to step and falls back at"
    message += f" steps {', '.join(map(str, numbers['resets_at_step'][:4]))}: weights arrive only then. Check that the"
    message += " engine applies every published version and drops its caches when it does"
    return Finding("hidden_staleness", "error", message, numbers)


def _stale_rows(evidence: Evidence, ref: Reference, which: np.ndarray, level: np.ndarray) -> Finding | None:
    """Two kinds of responses within one step: some drifted at most of their tokens, the others clean."""
    r = evidence.responses
    order = np.sort(level)
    n = np.arange(1, len(order))
    below = np.cumsum(order)[:-1]
    between = n * (len(order) - n) * (below / n - (order.sum() - below) / (len(order) - n)) ** 2
    cut = order[int(np.argmax(between))]
    high = level > cut
    small = min(high.sum(), (~high).sum())
    if small < 8 or small < 0.02 * len(high):
        return None
    gap = float(np.median(level[high]) - np.median(level[~high]))
    spread = math.sqrt(np.mean(np.where(high, level - level[high].mean(), level - level[~high].mean()) ** 2))
    if gap < math.log(9) or gap < 4.5 * spread:
        return None
    step, rank = r["step"][which], r["rank"][which]
    both = [one for one in np.unique(step) if high[step == one].any() and not high[step == one].all()]
    within = sum(int((step == one).sum()) for one in both) / len(step)
    length = stats.rankdata(r["length"][which])
    longer = (length[high].mean() - length[~high].mean()) / len(high)  # 1/2: every drifted one is longer
    if within < 0.1 or abs(longer) > 0.45 or (not np.isnan(rank).any() and _tells(rank, high)):
        return None
    numbers = {
        "share_of_responses_drifted": float(high.mean()),
        "rms_drifted_nats": float(np.exp(np.median(level[high]) / 2)),
        "rms_others_nats": float(np.exp(np.median(level[~high]) / 2)),
        "n_steps_with_both": len(both),
        "n_responses": len(high),
        "basis": ref.basis,
    }
    message = f"hidden staleness: {high.mean():.0%} of the responses that declare lag 0 differ at most of their tokens,"
    message += " the others of the same steps do not: older weights drew them (a version published before it was"
    message += " applied, or a prefix cache that outlived its weights). Stamp what is applied; drop caches on update"
    return Finding("hidden_staleness", "error", message, numbers)


def _tells(rank: np.ndarray, high: np.ndarray) -> bool:
    """Whether the rank alone says which kind a response is: then an engine differs, and `constancy` says so."""
    names, index = np.unique(rank, return_inverse=True)
    share = np.bincount(index, high) / np.bincount(index)
    return len(names) > 1 and bool(np.all((share < 0.05) | (share > 0.95)))
