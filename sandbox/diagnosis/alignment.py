"""Do the two columns speak of the same tokens? What was left out of a dump, and lists moved against each other."""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from sandbox.diagnosis.evidence import Evidence, Finding, Reference

FEW = 0.05  # of the rows: more than this with one data bug is a bug of the run, not a few bad rows
FAR, NEAR = 0.2, 0.25  # nats; share of it: lists that differ by FAR as they stand and by NEAR of that when moved
AFTER = 4  # tokens that must agree when moved


def refusals(evidence: Evidence) -> Iterator[Finding]:
    """One finding for each reason that the reader left something out; an error beyond FEW of the rows."""
    rows: dict[str, set[str]] = {}
    tokens: dict[str, int] = {}
    whole: dict[str, int] = {}
    examples: dict[str, str] = {}
    for one in evidence.refused:
        rows.setdefault(one.reason, set()).add(one.sample_id)
        tokens[one.reason] = tokens.get(one.reason, 0) + one.tokens
        whole[one.reason] = whole.get(one.reason, 0) + one.whole
        examples.setdefault(one.reason, f"{one.sample_id}: {one.detail or one.reason}")
    for reason, names in rows.items():
        # a broken file is one entry, whatever it held
        share = len(names) / max(evidence.n_rows, len(names))
        numbers = {"rows": len(names), "rows_left_out": whole[reason], "tokens_left_out": tokens[reason]}
        numbers |= {"n_rows": evidence.n_rows, "share_of_rows": share, "example": examples[reason]}
        severity = "error" if share > FEW or reason in ("truncated_file", "unsafe_pickle") else "warning"
        if reason in ("truncated_file", "unsafe_pickle") and evidence.n_rows:
            severity = "warning"  # the other files are whole
        yield Finding(
            reason, severity, f"{MENDS.get(reason, reason)} ({len(names)} of {evidence.n_rows} rows)", numbers
        )


MENDS = {
    "ids_differ": "sampler and trainer saw different token ids: train on the sampled ids, not on retokenised text",
    "lengths_differ": "columns of one row have different lengths: do not pad log-probabilities to that of the ids",
    "nonfinite": "nan in a counted token, or a drawn token of probability 0: the logits were garbage; find the step",
    "positive_logprob": "log-probabilities above 0: logits were stored, or another axis was normalised",
    "placeholder": "numbers that stand for no value (0.0, 1, -9999) are counted: mask them (a re-added EOS too)",
    "observation_tokens": "tokens that nobody sampled (tool output) are counted: mask them out of the loss",
    "negative_lag": "the sampler's version is newer than the trainer's: version stamps are swapped or late",
    "duplicate": "the same sample stands more than once: it would count twice",
    "missing_version": "versions are missing or no whole numbers: they are no lag 0; stamp every token at generation",
    "missing_logprob": "log-probabilities of one engine are missing: they were left out, not set to 0",
    "not_a_mask": "the mask holds weights, not 0 and 1: a loss that multiplies by it reweights responses",
    "mixed_schema": "rows have different columns or types: more than one writer, or more than one format",
    "unreadable_row": "rows that cannot be parsed: the writer was killed, or two wrote at once",
    "truncated_file": "a file that is not whole: wait for the writer, or leave it out",
    "unsafe_pickle": "a file that could run code was not opened: --trust-pickle opens it",
}


def misaligned(ref: Reference) -> list[Finding]:
    """`shift`: the trainer's log-probabilities are those of a neighbouring token; `retokenised`: from some token on."""
    shifted, split, moved = {}, {}, {}
    for by in (1, -1, 2, -2):
        pairs = _moved(ref, by)
        if not len(pairs.response):
            continue
        names, starts, counts = np.unique(pairs.response, return_index=True, return_counts=True)
        here, there = (np.add.reduceat(x, starts) / counts for x in (pairs.here, pairs.there))
        whole = (counts >= 3) & (here > FAR) & (there < NEAR * here)
        shifted[by], moved[by] = {*names[whole].tolist()}, pairs
        # as it stands before a place, moved by so many after it; the place itself is the token that was cut anew
        behind, ahead = np.cumsum(pairs.here) - pairs.here, np.cumsum(pairs.there)
        index = np.repeat(np.arange(len(names)), counts)
        cost = behind - behind[starts][index] + (ahead[starts + counts - 1][index] - ahead)
        place = np.arange(len(index)) - starts[index]
        inner = (place >= 2) & (counts[index] - place > AFTER)
        best = np.minimum.reduceat(np.where(inner, cost, np.inf), starts)
        part = ~whole & (here > FAR / 2) & (best < 0.1 * here * counts)
        split[by] = {*names[part].tolist()}
    n = len(np.unique(ref.tokens.response))
    found = []
    by = max(shifted, key=lambda k: len(shifted[k]), default=1)
    again = set().union(*split.values()) - set().union(*shifted.values())
    if len(shifted.get(by, ())) > max(FEW * n, len(again)):
        rows = np.isin(moved[by].response, [*shifted[by]])
        numbers = {
            "mean_abs_as_it_stands_nats": float(moved[by].here[rows].mean()),
            "mean_abs_aligned_nats": float(moved[by].there[rows].mean()),
            "share_of_responses": len(shifted[by]) / n,
            "n_responses": n,
            "n_tokens": int(rows.sum()),
            "basis": ref.basis,
        }
        side = "left" if by > 0 else "right"
        message = f"the trainer is shifted {side} by {abs(by)}: logp_train[i] belongs to logp_rollout[i {by:+d}]; align"
        found.append(Finding("shift", "error", message + " labels before gathering", numbers))
    elif len(again) > 1:
        again |= set().union(*shifted.values())  # cut anew near their start
        share = len(again) / n
        numbers = {"share_of_responses": share, "responses": len(again), "n_responses": n, "basis": ref.basis}
        message = f"the trainer tokenised the text of {len(again)} of {n} responses anew: they agree up to some token,"
        message += " and then only when moved by one or two. Train on the sampled ids, not on text that was encoded"
        message += " again"
        found.append(Finding("retokenised", "error" if share > FEW else "warning", message, numbers))
    return found


class _Pairs(NamedTuple):
    """Tokens i whose neighbour i + by is in the same response; |trainer[i] - sampler[i]|, and to sampler[i + by]."""

    response: np.ndarray
    here: np.ndarray
    there: np.ndarray


def _moved(ref: Reference, by: int) -> _Pairs:
    tokens = ref.tokens
    i = np.arange(max(-by, 0), len(tokens) - max(by, 0))
    i = i[(tokens.response[i + by] == tokens.response[i]) & (tokens.position[i + by] - tokens.position[i] == by)]
    return _Pairs(tokens.response[i], np.abs(ref.d[i]), np.abs(ref.trainer[i] - tokens.rollout[i + by]))
