"""What `mismatch exact` prints: every exact quantity of one case, under the names of the command's JSON object."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from sandbox.tabular import bias, exact, matrices
from sandbox.tabular.policy import policies_of
from sandbox.tabular.problems import Case

CORRECTIONS = ("none", "tis", "icepop", "cis", "dlc", "seq_is")


def summary(case: Case, with_matrices: bool = False) -> dict[str, Any]:
    """Numbers, (S, V) arrays and dicts of them.

    return_train, return_sampler; ess {lag, discrepancy, total: sequence level, exp(-D2); lag_under_sampler}; renyi2
    {lag, discrepancy, total}; kl_train_sampler, kl_sampler_train: pi against q, whole sequences, nats;
    token_kl_on_sampler_prefixes; gradient of the return at `logits`; expected_update and bias {correction};
    discrepancy_bias {leading, within_token, prefix, downstream, total: first order in d, zero lag, at the sampler's
    weights}; lag_matrices {H, M, F: sorted eigenvalues at the sampler's weights}, only if asked for.

    Raises BadInput: matrices of a problem too large for them.
    """
    policies = policies_of(case)
    result = dict(vars(exact.report(case.problem, policies)))
    del result["occupancy_sampler"]
    for name in ("expected_update", "bias"):
        result[name] = {correction: result[name][correction] for correction in CORRECTIONS}
    parts = bias.split(case.problem, policies.sync, -case.sampler_log_offset)
    result["discrepancy_bias"] = parts._asdict() | {"total": parts.total}
    return result | ({"lag_matrices": matrices.eigenvalues(case.problem, policies.sync)} if with_matrices else {})


def tables(result: dict[str, Any]) -> dict[str, Sequence[dict[str, Any]]]:
    """The same for people: title -> rows. Updates and biases by their Euclidean norm."""
    norm = np.linalg.norm
    size = float(norm(result["gradient"]))
    scalars = {name: value for name, value in result.items() if isinstance(value, float)}
    mismatch = [
        {"source": name, "sequence ESS": result["ess"][name], "Renyi D2, nats": result["renyi2"].get(name)}
        for name in result["ess"]
    ]
    updates = []
    for name, update in result["expected_update"].items():
        length = float(norm(update))
        cosine = float((update * result["gradient"]).sum() / (length * size)) if length * size > 0 else np.nan
        off = float(norm(result["bias"][name]))
        updates.append({"correction": name, "update": length, "cosine with gradient": cosine, "bias": off})
    left = {part: [c for c in CORRECTIONS if part in bias.DISCREPANCY_LEFT[c]] for part in bias.PARTS}
    parts = [
        {"part": name, "size": float(norm(part)), "left by": ", ".join(left.get(name, ()))}
        for name, part in result["discrepancy_bias"].items()
    ]
    shown: dict[str, Sequence[dict[str, Any]]] = {
        "returns, and KL in nats": [scalars],
        "mismatch": mismatch,
        f"expected update; the gradient has size {size:.3g}": updates,
        "bias of a small discrepancy, by parts": parts,
    }
    if "lag_matrices" in result:
        shown["matrices of the lag's feedback"] = [
            {"matrix": name, "smallest eigenvalue": float(values[0]), "largest eigenvalue": float(values[-1])}
            for name, values in result["lag_matrices"].items()
        ]
    return shown
