"""PROBLEM.json: read back what was written, defaults, one line for each mistake, and nothing but BadInput ever."""

import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sandbox.errors import BadInput
from sandbox.output import problem_json
from sandbox.tabular import problems
from sandbox.tabular.problems import Case
from tests.support import strategies

GOOD = {
    "transition": [[1, -1], [0, 1]],
    "reward": [[0.0, 1.0], [2.0, -1.0]],
    "horizon": 3,
    "logits": [[0.5, 0.0], [0, 1]],
}


def equal(one: Case, other: Case) -> bool:
    arrays = ("logits", "sampler_logits", "sampler_log_offset")
    return (
        all(np.array_equal(getattr(one, a), getattr(other, a)) for a in arrays)
        and all(np.array_equal(getattr(one.problem, a), getattr(other.problem, a)) for a in ("transition", "reward"))
        and (one.problem.horizon, one.problem.initial) == (other.problem.horizon, other.problem.initial)
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("problems")


@given(strategies.cases())
def test_what_is_saved_is_loaded_to_the_last_bit(folder, case):
    problem_json.save(folder / "case.json", case)
    assert equal(problem_json.load(folder / "case.json"), case)


@pytest.mark.parametrize("name", problems.PRESETS)
def test_presets_survive_a_file_and_go_by_their_names(folder, name, monkeypatch):
    monkeypatch.chdir(folder)
    case = problem_json.named(name)
    assert equal(case, problems.PRESETS[name]())
    problem_json.save(folder / f"{name}.json", case)
    assert equal(problem_json.named(f"{name}.json"), case)


def test_a_file_goes_before_a_preset_of_its_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bandit").write_text(json.dumps(GOOD))
    assert problem_json.named("bandit").problem.horizon == 3


def test_defaults():
    case = problem_json.loads(json.dumps(GOOD))
    assert case.problem.initial == 0
    assert np.array_equal(case.sampler_logits, GOOD["logits"])
    assert not case.sampler_log_offset.any()
    full = GOOD | {"initial": 1, "sampler_logits": [[1, 2], [3, 4]], "sampler_log_offset": [[0, 0.5], [0, 0]]}
    case = problem_json.loads(json.dumps(full))
    assert case.problem.initial == 1
    assert np.array_equal(case.logits, GOOD["logits"])
    assert np.array_equal(case.sampler_logits, full["sampler_logits"])
    assert np.array_equal(case.sampler_log_offset, full["sampler_log_offset"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"logits": [[0, 1], [0]]}, "logits[1] has 1 entries, expected 2"),
        ({"logits": [[0, 1]]}, "logits has shape (1, 2), expected (2, 2)"),
        ({"logits": [[0, 1], [math.nan, 0]]}, "logits[1][0] is nan, which is not finite"),
        ({"logits": [[0, 1], [0, "1"]]}, "logits[1][1] is '1', expected a number"),
        ({"sampler_logits": [[0, math.inf], [0, 0]]}, "sampler_logits[0][1] is inf, which is not finite"),
        ({"sampler_logits": None}, "sampler_logits is not a table of S rows and V columns"),
        ({"sampler_log_offset": [[0, 0], [-math.inf, 0]]}, "sampler_log_offset[1][0] is -inf, which is not finite"),
        ({"sampler_log_offset": [[0, 1e101], [0, 0]]}, "sampler_log_offset[0][1] is 1e+101, which is larger than"),
        ({"reward": [[0, 10**400], [0, 0]]}, "reward[0][1] is 1000000000"),
        ({"reward": [[0, True], [0, 0]]}, "reward[0][1] is True, expected a number"),
        ({"transition": [[1, 2], [0, 1]]}, "transition[0][1] is 2, which is out of range -1..1"),
        ({"transition": [[0], [1]]}, "transition[0] has 1 entry, expected a vocabulary of at least 2"),
        ({"horizon": 0}, "horizon is 0, expected at least 1"),
        ({"horizon": 10**60}, "expected at most 1048576 with 2 states"),
        ({"horizon": "x" * 10**6}, "expected an integer"),
        ({"horizon": math.nan}, "horizon is nan, expected an integer"),
        ({"initial": 2}, "initial is 2, out of range 0..1"),
        ({"sampler_logit": 1}, "unknown key 'sampler_logit', known: transition, reward, horizon, logits, initial, "),
    ],
)
def test_each_mistake_is_one_line_naming_field_and_index(tmp_path, change, message):
    path = tmp_path / "problem.json"
    path.write_text(json.dumps(GOOD | change))
    with pytest.raises(BadInput) as error:
        problem_json.load(path)
    text = str(error.value)
    assert text.startswith(f"{path}: ")
    assert message in text
    assert "\n" not in text
    assert len(text) < 400


@pytest.mark.parametrize("missing", problem_json.REQUIRED)
def test_a_missing_field_is_named(missing):
    with pytest.raises(BadInput, match=f"{missing} is missing"):
        problem_json.loads(json.dumps({k: v for k, v in GOOD.items() if k != missing}))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is not JSON"),
        (b"{'horizon': 3}", "is not JSON"),
        (b"\xff\xfe\x00", "cannot be read"),
        (b"[" * 100_000, "is not JSON: nested too deeply"),
        (b"[1, 2]", "is not a JSON object but [1, 2]"),
        (b'{"horizon": ' + b"9" * 5000 + b"}", "is not JSON"),
        (b'{"horizon": 1, "horizon": 2}', "'horizon' appears twice"),
    ],
)
def test_what_is_no_object_at_all(tmp_path, content, message):
    (tmp_path / "p.json").write_bytes(content)
    with pytest.raises(BadInput, match=r"p\.json: ") as error:
        problem_json.load(tmp_path / "p.json")
    assert message in str(error.value)


def test_no_such_file_a_folder_and_an_impossible_path(tmp_path):
    with pytest.raises(BadInput, match=r"nowhere: no such file, nor a preset \(bandit, sparse_tree, "):
        problem_json.named(tmp_path / "nowhere")
    with pytest.raises(BadInput, match="cannot be read"):
        problem_json.named(tmp_path)
    with pytest.raises(BadInput, match="cannot be read"):
        problem_json.named("a\0b")


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.integers(10**300, 10**320) | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=12,
)
FIELDS = (*problem_json.REQUIRED, *problem_json.OPTIONAL)


def refused_or_a_case(text: str) -> None:
    try:
        case = problem_json.loads(text)
    except BadInput as error:
        message = str(error)
    else:
        message = ""
        assert isinstance(case, Case)
        for name in ("logits", "sampler_logits", "sampler_log_offset"):
            assert np.isfinite(getattr(case, name)).all()
    assert "\n" not in message
    assert len(message) < 600


@settings(max_examples=300)
@given(st.dictionaries(st.sampled_from(FIELDS), anything), st.booleans())
def test_any_json_is_a_case_or_bad_input(changes, from_good):
    refused_or_a_case(json.dumps((GOOD if from_good else {}) | changes))


@settings(max_examples=300)
@given(st.sampled_from(("transition", "reward", "logits")), st.integers(0, 1), st.integers(0, 1), anything)
def test_any_entry_is_a_case_or_bad_input(field, row, column, entry):
    changed = json.loads(json.dumps(GOOD))
    changed[field][row][column] = entry
    refused_or_a_case(json.dumps(changed))
    changed[field][row] = entry
    refused_or_a_case(json.dumps(changed))


@settings(max_examples=300)
@given(st.data())
def test_a_damaged_text_is_a_case_or_bad_input(data):
    text = json.dumps(GOOD)
    start = data.draw(st.integers(0, len(text)))
    end = data.draw(st.integers(start, min(len(text), start + 6)))
    refused_or_a_case(text[:start] + data.draw(st.text(max_size=4)) + text[end:])


@given(st.binary(max_size=40))
def test_any_bytes_are_a_case_or_bad_input(folder, content):
    (folder / "fuzz.json").write_bytes(content)
    with pytest.raises(BadInput, match=r"fuzz\.json: "):
        problem_json.load(folder / "fuzz.json")
