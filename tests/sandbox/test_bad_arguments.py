"""Arguments that mean nothing are refused in one line that names them, by functions that a user calls directly."""

import numpy as np
import polars as pl
import pytest

from sandbox.corrections import CORRECTIONS
from sandbox.errors import BadInput
from sandbox.experiments import staleness
from sandbox.tabular import problems, recursions, simulate
from sandbox.tabular.simulate import SimConfig
from sandbox.theory import delay, lag, levels

NONE, RNG = CORRECTIONS["none"], np.random.default_rng
TREE = problems.sparse_tree(RNG(0), depth=2, vocabulary=3, top=0.4)
X = np.zeros(TREE.shape)
REACHED = pl.DataFrame({"cost": [0.0], "rule": ["threshold"], "value": [0.5], "return": [1.0]})  # no period
ONE = simulate.SimConfig(steps=1)


@pytest.mark.parametrize(
    ("field", "call"),
    [
        ("step_size", lambda: levels.mean_field(TREE, X, SimConfig(step_size=-1.0, steps=3))),
        ("steps", lambda: levels.mean_field(TREE, X, SimConfig(step_size=0.1, steps=0))),
        ("threshold", lambda: levels.mean_field(TREE, X, SimConfig(step_size=0.1, steps=2), threshold=2)),
        ("step_size", lambda: levels.closed_form(TREE, X, float("nan"), 4)),
        ("n", lambda: levels.closed_form(TREE, X, 0.1, 0)),
        ("n", lambda: levels.closed_form(TREE, X, 0.1, -3)),
        ("threshold", lambda: levels.closed_form(TREE, X, 0.1, 4, threshold=-0.1)),
        ("responses", lambda: levels.trace_fisher_covariance(TREE, X, responses=0)),
        ("step_size", lambda: levels.linearised(TREE, X, SimConfig(step_size=0.0, steps=3), 0.0)),
        ("steps", lambda: levels.linearised(TREE, X, SimConfig(step_size=0.1, steps=0), 0.0)),
        ("noise", lambda: levels.linearised(TREE, X, SimConfig(step_size=0.1, steps=3), -1.0)),
        ("top", lambda: problems.sparse_tree(RNG(0), top=2)),
        ("top", lambda: problems.sparse_tree(RNG(0), top=0)),
        ("depth", lambda: problems.sparse_tree(RNG(0), depth=0)),
        ("states", lambda: problems.state_machine(RNG(0), 0, 3, 4)),
        ("vocabulary", lambda: problems.state_machine(RNG(0), 3, 1, 4)),
        ("horizon", lambda: problems.state_machine(RNG(0), 3, 3, 0)),
        ("step_size", lambda: simulate.SimConfig(step_size=-1)),
        ("seed", lambda: simulate.SimConfig(seed=-1)),
        ("runs", lambda: simulate.run(TREE, X, ONE, [])),
        ("runs", lambda: simulate.run(TREE, X, ONE, [0, -1])),
        ("threads", lambda: simulate.run(TREE, X, ONE, [0], threads=0)),
        ("step_size", lambda: lag.path(TREE, X, SimConfig(step_size=-0.1, steps=3))),
        ("steps", lambda: lag.path(TREE, X, SimConfig(step_size=0.1, steps=-3))),
        ("step_size", lambda: delay.roots(-1.0, 1.0, -0.1, 2)),
        ("rewards", lambda: problems.bandit(5)),
        ("rewards", lambda: problems.bandit(np.zeros((2, 2)))),
        ("logits", lambda: levels.closed_form(TREE, X[:, :2], 0.1, 4)),
        ("order", lambda: recursions.past_moments(TREE, X, -1)),
        ("reached", lambda: staleness.optimum(pl.DataFrame(), 0.0)),
        ("reached", lambda: staleness.optimum(REACHED, 0.0)),
        ("steps", lambda: delay.recursion(-1.0, 0.0, 0.0, 0.1, 0, 1.0, -2)),
        ("tau", lambda: delay.recursion(-1.0, 0.0, 0.0, 0.1, -1, 1.0, 2)),
        ("step_size", lambda: delay.companion(-1.0, 1.0, 0.0, 2)),
    ],
)
def test_refused_by_name(field, call):
    with pytest.raises(BadInput) as raised:
        call()
    message = str(raised.value)
    assert message.startswith((f"{field} is ", f"{field} has "))
    assert "\n" not in message
