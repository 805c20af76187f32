"""Run descriptions: TOML into frozen dataclasses and back into plain data for run.json.

A correction is written as a preset's name, `correction = "dlc"`, or as a table that changes some of its fields,
`correction = {preset = "dlc", cap = 3.0}`; a resync rule likewise. A preset may also be a rule's class:
`{preset = "Compose", rules = [{preset = "Truncate", on = "discrepancy"}, "opsm"]}`. Unknown keys are errors. `inf` is
TOML's own inf.
"""

import tomllib
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_origin

import cattrs
from cattrs.errors import BaseValidationError
from cattrs.v import format_exception, transform_error

from sandbox.corrections import RESYNCS, Correction, Resync, presets
from sandbox.errors import BadInput

T = TypeVar("T")

CONVERTER = cattrs.Converter(forbid_extra_keys=True)
PRESETS: dict[type, Mapping[str, Any]] = {Correction: presets.PRESETS | presets.RULES, Resync: RESYNCS}


def load(path: Path, cls: type[T]) -> T:
    """The dataclass `cls` that a TOML file describes.

    Raises BadInput: no such file, not TOML, an unknown key, a value of the wrong type, an unknown preset.
    """
    try:
        data = tomllib.loads(path.read_text())
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(f"config {path} cannot be read: {getattr(error, 'strerror', None) or error}") from error
    except tomllib.TOMLDecodeError as error:
        raise BadInput(f"config {path} is not TOML: {error}") from error
    try:
        return structure(data, cls)
    except BadInput as error:
        raise BadInput(f"config {path}: {error}") from error


def structure(data: Mapping[str, Any], cls: type[T]) -> T:
    """The dataclass `cls` from plain data; BadInput, one line, naming each bad field."""
    try:
        return CONVERTER.structure(data, cls)
    except BaseValidationError as error:
        messages = transform_error(error, path="", format_exception=_words)
        raise BadInput("; ".join(m.removesuffix(" @ ").replace(" @ .", " at ") for m in messages)) from error


def _words(error: BaseException, kind: type | None) -> str:
    return str(error) if isinstance(error, BadInput) else format_exception(error, kind)


def resolved(config: Any) -> dict[str, Any]:
    """Plain data of a config, every default filled in; `structure` reads it back to an equal config."""
    return CONVERTER.unstructure(config)


def preset(name: str, kind: type) -> Any:
    """The preset of that name ("dlc", "ess_below", ...); BadInput listing the known ones."""
    known = PRESETS[kind]
    if name not in known:
        raise BadInput(f"unknown {kind.__name__.lower()} {name!r}, known: {', '.join(known)}")
    return known[name]


def _structure_preset(value: Any, kind: type) -> Any:
    if isinstance(value, str):
        return preset(value, kind)
    if not isinstance(value, Mapping) or "preset" not in value:
        raise BadInput(f"a {kind.__name__.lower()} is a preset's name or a table with the key 'preset', not {value!r}")
    base = preset(value["preset"], kind)
    changed = {key: item for key, item in value.items() if key != "preset"}
    unknown = changed.keys() - {field.name for field in fields(base)}
    if unknown:
        raise BadInput(f"unknown key {', '.join(sorted(unknown))} in {kind.__name__.lower()} {value['preset']!r}")
    return CONVERTER.structure(_plain(base) | changed, type(base))


def _unstructure_preset(value: Any, kind: type) -> dict[str, Any]:
    named = [name for name, known in PRESETS[kind].items() if type(known) is type(value)]
    exact = [name for name in named if PRESETS[kind][name] == value]
    return {"preset": (exact or named)[0], **_plain(value)}


def _plain(value: Any) -> dict[str, Any]:
    return {f.name: CONVERTER.unstructure(getattr(value, f.name), unstructure_as=f.type) for f in fields(value)}


def _structure_scalar(value: Any, kind: type) -> Any:
    # cattrs would call kind(value): 1.5 for an int would silently be 1
    if type(value) is kind or (kind is float and type(value) is int):
        return kind(value)
    if kind is float and value in ("inf", "-inf"):  # as run.json has them
        return float(value)
    raise BadInput(f"{value!r} is not of type {kind.__name__}")


def _structure_literal(value: Any, kind: type) -> Any:
    if value not in get_args(kind):
        raise BadInput(f"{value!r} is none of {', '.join(map(repr, get_args(kind)))}")
    return value


CONVERTER.register_structure_hook_func(lambda cls: get_origin(cls) is Literal, _structure_literal)
for _scalar in (int, float, str, bool):
    CONVERTER.register_structure_hook(_scalar, _structure_scalar)
for _kind in PRESETS:
    CONVERTER.register_structure_hook_func(
        lambda cls, kind=_kind: cls is kind, lambda v, _, kind=_kind: _structure_preset(v, kind)
    )
    CONVERTER.register_unstructure_hook_func(
        lambda cls, kind=_kind: cls is kind, lambda v, kind=_kind: _unstructure_preset(v, kind)
    )
