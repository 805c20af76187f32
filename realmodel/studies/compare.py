"""Predicted against observed: what the steps tables of real runs say about their ess_step and failure_step.

Two events, two names. `ess_step`: updates since the sync until the sequence ESS of the lag, on a fixed probe of at
least 1,024 responses, is below the threshold. `failure_step`: first lasting drop of the pass rate below on-policy.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import torch

from realmodel.policy import model as policy
from realmodel.policy import tasks
from realmodel.policy.align import Rollout, pad, predicted_by
from realmodel.policy.logprobs import log_probs, pieces
from realmodel.training.settings import Learner
from sandbox.errors import BadInput
from sandbox.experiments import predict as predictions
from sandbox.output import report
from sandbox.theory import collapse
from sandbox.theory.collapse import failure_step, shortfall

Told = tuple[dict[str, Any], dict[str, Sequence[dict[str, Any]]]]  # what --json prints, and tables for people
TABLE_MIB = 256  # of whole tables of log-probabilities at once


@dataclass(frozen=True)
class Crossing:
    """Where the probe's ESS first passed the threshold, in updates since the sync; inf: not while this sync lasted.

    low, high: the same for ESS - 1.96 and + 1.96 standard errors.
    measured: updates for which the sync was watched.
    """

    step: float
    low: float
    high: float
    measured: int


def first_probe(steps: pl.DataFrame) -> pl.DataFrame:
    """The measurements on a run's first probe, until its first resync or (probe_kept) its end: columns k (updates),
    ess, ess_se, var_log_ratio, token_kl.

    Raises BadInput for a run whose config had no probe.
    """
    if "probe_ess" not in steps.columns:
        raise BadInput("steps has no probe_ess: the run was made with probe = 0")
    return steps.filter(pl.col("probe_version") == 0).select(
        pl.col("version_train").alias("k"),
        pl.col("probe_ess").alias("ess"),
        pl.col("probe_ess_se").alias("ess_se"),
        pl.col("probe_var_log_ratio").alias("var_log_ratio"),
        pl.col("probe_token_kl").alias("token_kl"),
    )


def observed_ess_step(since_sync: pl.DataFrame, threshold: float = 0.5) -> Crossing:
    """First k at which the probe's ESS is below the threshold, from the table of `first_probe`."""
    k, ess, margin = since_sync["k"], since_sync["ess"], 1.96 * since_sync["ess_se"]

    def first(values: pl.Series) -> float:
        below = k.filter(values < threshold)
        return float(below[0]) if len(below) else math.inf

    return Crossing(first(ess), first(ess - margin), first(ess + margin), int(k[-1]))


def predicted_ess_step(
    since_sync: pl.DataFrame, horizon: int, threshold: float = 0.5, curvature: bool = False
) -> collapse.Fit:
    """The out-of-sample prediction: a k^2 + b k fitted to the first steps' Var[log r] only (collapse.fit_collapse)."""
    later = since_sync.filter(pl.col("k") > 0)
    # only the rise to the limit: a variance that comes back down to it later is no early measurement
    beyond = later["var_log_ratio"] > collapse.var_threshold(threshold) * collapse.FIT_SHARE
    later = later.head(int(beyond.arg_max() or 0) if beyond.any() else len(later))
    return collapse.fit_collapse(
        later["k"].to_numpy(), later["var_log_ratio"].to_numpy(), threshold, horizon, curvature
    )


def pass_rates(steps: pl.DataFrame) -> np.ndarray:
    """Exact pass probability before each update and after the last, by held-out problem. (steps + 1, problems)"""
    return np.array(steps["pass_probability"].to_list())


def held_out_responses(learner: Learner, task: str, weights: dict) -> Rollout:
    """One response to each of 1,024 held-out problems, drawn from the policy at `weights`, which the model then holds:
    what `sequence_kl` is computed on, the same problems in every run."""
    learner.model.load_state_dict(weights)
    problems = tasks.get(task).sample(np.random.default_rng([0, 3]), 1024, held_out=True)
    encode = learner.tokenizer.encode
    longest = 1 + max(len(encode(p.answer)) for p in problems)
    prompts, stream = [encode(p.prompt) for p in problems], torch.Generator().manual_seed(0)
    return policy.sample(learner.model, prompts, 1, longest, stream, learner.tokenizer.eos_token_id)


def sequence_kl(learner: Any, responses: Rollout, of: dict, to: dict) -> float:
    """KL(of || to) of whole responses, nats: the exact KL of every next-token distribution, summed over each response.

    Args:
        learner: model and tokenizer that the weights belong to.
        responses: drawn from the policy at weights `of`.
        of, to: weight snapshots.
    """
    ids, attention = pad(responses, learner.tokenizer.pad_token_id)
    rows, _, mask = predicted_by(responses)
    vocabulary = learner.model.get_input_embeddings().num_embeddings
    found = []
    for piece in pieces(len(ids), max(1, TABLE_MIB * 2**18 // (vocabulary * ids.shape[1]))):
        tables = (log_probs(learner.model, ids[piece], attention[piece], weights=w).cpu() for w in (of, to))
        first, second = tables
        per_token = (first.exp() * (first - second)).sum(-1)
        found.append(torch.where(mask[piece], per_token.gather(1, rows[piece]), 0.0).sum(1))
    return float(torch.cat(found).double().mean())


def predict(run: Path, on_policy: Sequence[Path], threshold: float) -> dict[str, Any]:
    """`predict.measured` of a run folder, with its failure_step: nan without two on-policy run folders or more.

    Raises BadInput for a folder without a readable steps.parquet, or whose run had no probe.
    """
    steps = read_steps(run)
    references = [pass_rates(read_steps(folder)) for folder in on_policy]
    failure = failure_step(pass_rates(steps), references) if references else math.nan
    return predictions.measured(first_probe(steps), threshold, len(steps) - 1) | {"failure_step": failure}


def read_steps(run: Path) -> pl.DataFrame:
    """The steps.parquet of a run folder. Raises BadInput where it has none."""
    try:
        return pl.read_parquet(run / "steps.parquet")
    except (OSError, pl.exceptions.PolarsError) as error:
        raise BadInput(f"run folder {run} has no readable steps.parquet") from error


def summary(steps: pl.DataFrame, on_policy: Sequence[np.ndarray], threshold: float = 0.5) -> dict[str, Any]:
    """One run's row of the demo's table and of `mismatch demo --json`, but for the KL from on-policy.

    on_policy: of `pass_rates`, (steps + 1, problems) each.
    """
    rates = pass_rates(steps)
    difference, error = shortfall(rates, on_policy)
    watched = first_probe(steps)
    observed = observed_ess_step(watched, threshold)
    fit = predicted_ess_step(watched, horizon=len(steps) - 1, threshold=threshold)
    at = watched.filter(pl.col("k") == observed.step)["token_kl"]
    return {
        "predicted_ess_step": fit.ess_step,
        "prediction": fit.status,
        "points_fitted": fit.points_used,
        "predicted_interval": list(fit.interval),
        "out_of_sample": observed.step >= 2 * fit.points_used,
        "observed_ess_step": observed.step,
        "observed_interval": [observed.low, observed.high],
        "watched_updates": observed.measured,
        "updates": len(steps) - 1,
        "failure_step": failure_step(rates, on_policy),
        "token_kl_at_ess_step": float(at[0]) if len(at) else math.nan,
        "final_pass_rate": float(rates[-1].mean()),
        "final_shortfall": float(difference[-1]),
        "final_shortfall_se": float(error[-1]),
        "syncs": int(steps["synced"].sum()),
        "longest_below_threshold": longest_run(steps["probe_ess"].to_numpy() < threshold),
    }


def shown(row: dict[str, Any]) -> dict[str, Any]:
    """A row of `summary` as people read it."""
    step, updates, watched = report.update_or_none, row["updates"], row["watched_updates"]
    unknown = row["prediction"] == "not_identifiable"
    return {
        "predicted ess_step": "not identifiable" if unknown else step(row["predicted_ess_step"], updates),
        "updates fitted": row["points_fitted"],
        "observed ess_step": step(row["observed_ess_step"], watched),
        "observed, earliest (95 %)": step(row["observed_interval"][0], watched),
        "observed, latest (95 %)": step(row["observed_interval"][1], watched),
        "failure_step": step(row["failure_step"], updates),
        "token KL at ess_step (k3, nats)": row["token_kl_at_ess_step"],
        "below on-policy": row["final_shortfall"],
        "standard error": row["final_shortfall_se"],
        "updates in a row with ESS below 1/2": row["longest_below_threshold"],
    }


def longest_run(flags: np.ndarray) -> int:
    """The largest number of consecutive True. (n,)"""
    longest = current = 0
    for flag in flags:
        current = current + 1 if flag else 0
        longest = max(longest, current)
    return longest


def runs(folders: Sequence[Path], on_policy: Sequence[Path], threshold: float) -> Told:
    """A row a run folder, of `summary`. Raises BadInput for fewer than two on-policy runs."""
    if len(on_policy) < 2:
        raise BadInput(
            f"on_policy has {len(on_policy)} run folders, expected two or more: the noise of seeds needs two"
        )
    against = [pass_rates(read_steps(run)) for run in on_policy]
    rows = [{"run": run.name} | summary(read_steps(run), against, threshold) for run in folders]
    return {"runs": rows}, {
        "ess_step, updates since the sync": [
            {"run": row["run"]} | shown(row) | {"final_pass_rate": row["final_pass_rate"], "syncs": row["syncs"]}
            for row in rows
        ]
    }
