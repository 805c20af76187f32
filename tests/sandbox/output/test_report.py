"""The page stands alone, escapes text, and shows what does not exist as a dash."""

import math
import re

import matplotlib.pyplot as plt
import polars as pl

from sandbox.corrections import CORRECTIONS
from sandbox.output import plots, report


def test_page_is_self_contained_and_escaped():
    figure, ax = plt.subplots()
    plots.ess_curves(ax, {"tis": pl.DataFrame({"step": [0, 1], "ess": [1.0, 0.4], "synced": [False, True]})})
    rows = report.aligned([{"run": "<b>", "x": 0.12345}, {"run": "dlc", "y": math.inf}])
    page = report.render("A & B", [report.Section("One", ("p < q",), rows, plots.svg(figure))], {"commit": "abc"})
    plt.close(figure)
    assert "A &amp; B" in page
    assert "p &lt; q" in page
    assert "<td>&lt;b&gt;</td><td>0.123</td><td>-</td>" in page
    assert "<td>dlc</td><td>-</td><td>∞</td>" in page
    assert page.count("<svg") == 1
    assert not re.search(r"""(src|href)=["'](?!#)""", page)  # nothing to fetch
    assert "commit: abc" in page


def test_cells():
    values = (None, math.nan, True, 3.0, 1234567.0, 0.00012345, [4.0, math.inf], [1, 2, 3], "a")
    assert [report.cell(x) for x in values] == [
        "-", "-", "yes", "3", "1234567", "0.000123", "4 to ∞", "1, 2, 3", "a",
    ]  # fmt: skip


def test_every_correction_has_a_style_of_its_own():
    assert set(CORRECTIONS) <= set(plots.STYLES)
    looks = [(style["color"], str(style["linestyle"])) for style in plots.STYLES.values()]
    assert len(set(looks)) == len(looks)


def test_figures_draw_what_they_are_given():
    _, ax = plt.subplots()
    table = pl.DataFrame({"step": [0, 1, 2], "discrepancy": [1e-4] * 3, "lag": [0.0, 4e-4, None]})
    plots.decomposition(ax, {"none": table})
    lag, d = ax.lines[0], ax.lines[1]
    assert lag.get_ydata()[1] == 0.02
    assert d.get_ydata()[0] == 0.01
    plt.close()
    _, ax = plt.subplots()
    fit = pl.DataFrame({"k": [0, 1, 2, 4], "var_log_ratio": [0.0, 0.1, 0.3, 1.2]})
    plots.variance_fit(ax, {"none": fit}, {"none": (0.05, 0.05)}, 0.0866)
    assert ax.lines[1].get_ydata()[-1] == 0.05 * 16 + 0.05 * 4
    plt.close()
