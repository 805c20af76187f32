"""report.html: one self-contained page (no network) of prose, tables and figures, provenance at its foot."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jinja2 import Environment, StrictUndefined

TEMPLATE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{{ title }}</title>
<style>
 body { font: 15px/1.5 system-ui, sans-serif; max-width: 90rem; margin: 2rem auto; padding: 0 1rem; color: #222; }
 h1 { font-size: 1.6rem; } h2 { font-size: 1.15rem; margin-top: 2rem; } p { max-width: 52rem; }
 .wide { overflow-x: auto; } table { border-collapse: collapse; font-size: 13px; }
 th, td { padding: .3rem .7rem; text-align: right; border-bottom: 1px solid #ddd; white-space: nowrap; }
 th { border-bottom: 2px solid #888; vertical-align: bottom; white-space: normal; min-width: 4.5rem; }
 th:first-child, td:first-child { text-align: left; }
 td.text { text-align: left; white-space: normal; min-width: 24rem; max-width: 48rem; }
 figure { margin: 1rem 0; } svg { max-width: 100%; height: auto; }
 footer { margin-top: 3rem; border-top: 1px solid #ddd; font-size: 12px; color: #555; overflow-wrap: anywhere; }
</style></head><body>
<h1>{{ title }}</h1>
{% for section in sections %}
<h2>{{ section.heading }}</h2>
{% for paragraph in section.prose %}<p>{{ paragraph }}</p>
{% endfor %}
{% if section.rows %}<div class="wide"><table><thead><tr>
{% for name in section.rows[0] %}<th>{{ name | heading }}</th>{% endfor %}
</tr></thead><tbody>
{% for row in section.rows %}<tr>{% for value in row.values() %}
{% set prose = value is string and value | length > 40 %}
<td{{ ' class=text' if prose }}>{{ value | cell }}</td>{% endfor %}</tr>
{% endfor %}</tbody></table></div>{% endif %}
{% if section.figure %}<figure>{{ section.figure | safe }}</figure>{% endif %}
{% endfor %}
<footer>{% for name, value in provenance.items() %}{{ name }}: {{ value }}<br>{% endfor %}</footer>
</body></html>
"""


@dataclass(frozen=True)
class Section:
    """One part of a page: a heading, paragraphs, a table (one dict a row, the same keys in each) and an SVG figure."""

    heading: str
    prose: tuple[str, ...] = ()
    rows: tuple[dict[str, Any], ...] = ()
    figure: str = ""


def render(title: str, sections: list[Section], provenance: dict[str, Any]) -> str:
    """The page. Text is escaped; figures, which are ours, are not."""
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    environment.filters |= {"cell": cell, "heading": heading}
    return environment.from_string(TEMPLATE).render(title=title, sections=sections, provenance=provenance)


def heading(name: str) -> str:
    """A column's name for people; the two steps keep the names that everything else gives them."""
    return name.replace("_", " ").replace("ess step", "ess_step").replace("failure step", "failure_step")


def cell(value: Any) -> str:
    """A table's cell for people: three significant digits, a dash for what does not exist."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return "-"
    if isinstance(value, list | tuple):
        return (" to " if len(value) == 2 else ", ").join(map(cell, value))
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return "∞" if math.isinf(value) else (f"{value:.0f}" if value.is_integer() else f"{value:.3g}")
    return str(value)


def update_or_none(step: float, horizon: int) -> Any:
    """A step of training in a table for people: its number, or that none came within `horizon` updates."""
    return f"none within {horizon} updates" if math.isinf(step) else step


def aligned(rows: Sequence[dict[str, Any]]) -> tuple[dict[str, Any], ...]:
    """The rows with the same keys in each, in order of first appearance; None where a row has no such value."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    return tuple({name: row.get(name) for name in names} for row in rows)
