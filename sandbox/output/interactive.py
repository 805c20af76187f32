"""Sliders in a notebook: a figure that follows them, drawn by the same function as the static one.

`draw(**values) -> Figure` must be fast, so it uses the exact engine. Do not put Monte Carlo behind a slider.
"""

from collections.abc import Callable
from html import escape

import ipywidgets
from matplotlib.figure import Figure

from sandbox.errors import BadInput
from sandbox.output import plots


def explore(draw: Callable[..., Figure], **sliders: ipywidgets.ValueWidget) -> ipywidgets.VBox:
    """The sliders, and below them the figure of their values.

    Args:
        sliders: argument of `draw` -> widget whose `value` it gets.
    """
    page = ipywidgets.HTML()

    def follow(_: object = None) -> None:
        page.value = picture(draw, **{name: slider.value for name, slider in sliders.items()})

    for slider in sliders.values():
        slider.observe(follow, "value")
    follow()
    return ipywidgets.VBox([*sliders.values(), page])


def picture(draw: Callable[..., Figure], **values: object) -> str:
    """The figure as an SVG element, or in its place the sentence that says why there is none."""
    try:
        return plots.svg(draw(**values))
    except BadInput as error:
        return f"<p>No figure: {escape(str(error))}.</p>"
