"""Tables for people: nothing is wider than the page, nothing is cut off, and no number is wrapped."""

import io
import json
import math
import re
from pathlib import Path

import pytest

from realmodel import terminal
from sandbox.experiments import sweep
from sandbox.output import report


def printed(rows, as_json=False):
    stream = io.StringIO()
    terminal.show(stream, {"rows": rows}, as_json, {"a title that says what the table holds": rows})
    return stream.getvalue()


def test_a_wide_table_is_split_and_every_part_has_the_first_column():
    rows = [{"run": f"run-{i}", **{f"measured number {k}": 1000.5 + i + 7 * k for k in range(30)}} for i in (1, 2)]
    lines = printed(rows).splitlines()
    assert max(map(len, lines)) <= terminal.PIPE_WIDTH
    told = [line for line in lines if "run-2" in line]
    assert len(told) > 1
    found = [float(x) for line in told for x in re.findall(r"[\d.]+e?[+\d]*", line.split("run-2")[1])]
    assert found == [float(report.cell(value)) for value in list(rows[1].values())[1:]]


def test_long_text_is_wrapped_and_a_narrow_table_stays_whole():
    rows = [{"claim": "C1", "n": 64, "reason": "the ratio is what it is " * 20}]
    text = printed(rows)
    assert max(map(len, text.splitlines())) <= terminal.PIPE_WIDTH
    assert text.count("C1") == 1
    assert re.sub(r"[^a-z]", "", text.split("reason")[1]).count("theratioiswhatitis") == 20


def test_headings_and_cells_of_a_demo_are_whole():
    """No column is cut at the page's edge: the last character of every line is a border."""
    never = "none within 50 updates"
    row = {"run": "uncorrected, seed 1", "predicted ess_step": never, "updates fitted": 3, "observed ess_step": 12.0}
    row |= {f"observed, {which} (95 %)": never for which in ("earliest", "latest")} | {"failure_step": never}
    lines = printed([row, row]).splitlines()[1:]
    assert {line[-1] for line in lines} <= set("┓┃┩│┘")
    assert max(map(len, lines)) <= terminal.PIPE_WIDTH
    assert "\n".join(lines).count(never) == 8


CONFIGS = Path(__file__).resolve().parents[2] / "realmodel" / "configs"


@pytest.mark.parametrize(
    "command",
    [
        ("exact", "machine", "--matrices"),
        ("claims", "C1", "C10", "N4", "N5", "--fast"),
        ("predict", str(CONFIGS / "predict.toml")),
    ],
    ids=lambda command: command[0],
)
def test_a_command_prints_nothing_wider_than_a_page(mismatch, command):
    status, out, _ = mismatch(*command)
    assert status == 0
    assert 0 < max(map(len, out.splitlines())) <= terminal.PIPE_WIDTH


def test_cells_of_a_sweep_are_numbered_and_steps_that_never_came_are_words():
    settings = sweep.SweepConfig(problems=("sparse_tree",), steps=7)
    rows = [{"problem": "sparse_tree", "ess_step": step, "failure_step": math.inf} for step in (3.0, math.inf)]
    never = "none within 7 updates"
    assert sweep.shown(settings, rows) == [
        {"cell": 0, "problem": "sparse_tree", "ess_step": 3.0, "failure_step": never},
        {"cell": 1, "problem": "sparse_tree", "ess_step": never, "failure_step": never},
    ]


def test_json_is_one_object_with_all_columns():
    rows = [{f"x{k}": k for k in range(50)}]
    assert json.loads(printed(rows, as_json=True)) == {"rows": rows}


def test_a_step_that_never_came_is_said_in_words():
    assert report.update_or_none(math.inf, 50) == "none within 50 updates"
    assert report.update_or_none(7.0, 50) == 7.0
    assert report.cell(report.update_or_none(math.nan, 50)) == "-"
    assert report.cell((0.25, 3.0)) == "0.25 to 3"
