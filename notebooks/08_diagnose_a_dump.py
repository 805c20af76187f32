# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     name: python3
# ---

# %% [markdown]
# # Diagnose a dump
#
# A dump holds the log-probabilities that the sampler and the trainer gave to each token of a response. Is their
# mismatch numerics, lag, or a bug? `mismatch diagnose DUMP` answers on the command line. This page takes its steps one
# by one.

# %%
import numpy as np

from sandbox.diagnosis import attribution, evidence, judgement, semantics
from sandbox.diagnosis.diagnose import diagnose
from sandbox.diagnosis.dumps import table_of
from sandbox.diagnosis.refusals import check
from sandbox.diagnosis.rollouts import Chunk

rng = np.random.default_rng(0)


def response(step: int, behind: int) -> dict:
    """40 tokens drawn `behind` versions ago: d has sd .01, g grows with the lag."""
    q = -rng.exponential(0.7, 40) - 0.5
    mu = q + 0.01 * rng.standard_normal(40)
    pi = mu + 0.02 * behind * rng.standard_normal(40)
    stamps = {"step": step, "version_rollout": step - behind, "version_train": step}
    return stamps | {"logp_rollout": q, "logp_sync": mu, "logp_train": pi, "reward": 1.0}


def chunk(rows: list[dict]) -> Chunk:
    """What the readers make of a piece of a dump: rows that can be used, and why the others cannot."""
    return check(table_of("notebook", np.arange(len(rows)), rows, []), set())


rows = [response(10 + i // 32, i % 5) for i in range(320)]

# %% [markdown]
# **Refuse, do not guess.** Two rows get a defect: a token without a log-prob, and a stamp from the future. The first
# loses a token, the second is refused, each with its reason; everything else is analysed.

# %%
rows[3]["logp_rollout"][7] = -9999
rows[4]["version_rollout"] = 99
piece = chunk(rows)
for refused in piece.refused:
    print(refused.sample_id, refused.reason, refused.detail)
assert {r.reason for r in piece.refused} == {"placeholder", "negative_lag"}
assert len(piece.rollouts.lengths) == 319

# %% [markdown]
# **Semantics before statistics.** Dumps may be larger than memory: chunks are reduced to sums, and some of their tokens
# are kept for the tests that need single ones. Nothing is shifted, tempered or truncated here.

# %%
collected = evidence.collect([piece])
reference = evidence.reference(collected)
assert reference.basis == "logp_sync"
found = semantics.findings(collected, reference)
assert {f.code for f in found} == {"placeholder", "negative_lag"}

# %% [markdown]
# **Numerics against lag.** The identity t = d + g holds token by token, so the mean squares add up with the cross term.

# %%
split = attribution.split(collected, resynced=True)
print(split, split.lag_share)
assert np.isclose(split.discrepancy + split.lag + split.cross_term, split.total)
assert abs(split.discrepancy - 1e-4) < 1e-5  # sd .01

# %% [markdown]
# **Judgement.** ESS with n, interval and Pareto k; the predicted `ess_step`; a verdict with advice.

# %%
print(judgement.ess(collected, resynced=True)["sequence"])
outcome = diagnose([piece])
print(outcome["verdict"], *outcome["advice"], sep="\n- ")
assert outcome["verdict"] == "lag"

# %% [markdown]
# The same rows without `logp_sync` and without any token of lag 0: no split exists, and the verdict says so.

# %%
blind = [{k: v for k, v in row.items() if k != "logp_sync"} for row in rows if row["version_rollout"] < row["step"]]
assert diagnose([chunk(blind)])["verdict"] == "not_identifiable"

# %% [markdown]
# A sampler at temperature 0.7 and a trainer at 1: a bug. The diagnosis advises to repair it first, and no correction.

# %%
hot = [row | {"logp_sync": 0.7 * row["logp_rollout"], "logp_train": 0.7 * row["logp_rollout"]} for row in rows[10:]]
wrong = diagnose([chunk(hot)])
print(wrong["verdict"], wrong["advice"])
assert wrong["verdict"] == "semantics"
