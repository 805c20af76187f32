"""Every notebook runs from top to bottom, its claims asserted, its sliders at their ends; so does every Python example
of the README."""

import re
import runpy
from pathlib import Path

import ipywidgets
import matplotlib.pyplot as plt
import pytest
from matplotlib.figure import Figure

from sandbox.errors import BadInput
from sandbox.output import interactive

ROOT = Path(__file__).parent.parent
EXAMPLES = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)


@pytest.mark.parametrize("notebook", sorted((ROOT / "notebooks").glob("*.py")), ids=lambda path: path.stem)
def test_notebook(notebook: Path, tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    boxes = []
    explore = interactive.explore
    monkeypatch.setattr(interactive, "explore", lambda draw, **sliders: boxes.append(explore(draw, **sliders)))
    runpy.run_path(str(notebook))
    plt.close("all")
    assert boxes or notebook.stem[:2] in ("01", "07", "08")
    for box in boxes:
        *sliders, page = box.children
        for slider in sliders:
            ends = slider.options if hasattr(slider, "options") else (slider.min, slider.max)
            pages = set()
            for end in ends:  # a logarithmic slider's are exponents
                slider.value = slider.base**end if hasattr(slider, "base") else end
                pages.add(page.value)
            assert all(x.startswith("<svg") for x in pages)
            assert len(pages) == len(ends)


def test_a_slider_moves_the_figure_and_a_bad_value_is_a_sentence():
    def draw(tau: int, gain: float) -> Figure:
        if gain < 0:
            raise BadInput(f"gain is {gain}, expected <a number> >= 0")
        figure = Figure(figsize=(2, 2))
        figure.subplots().plot([0, tau], [0, gain])
        return figure

    sliders = {"tau": ipywidgets.IntSlider(2), "gain": ipywidgets.FloatSlider(1.0, min=-1, max=2)}
    box = interactive.explore(draw, **sliders)
    page, first = box.children[-1], box.children[-1].value
    assert first.startswith("<svg")
    sliders["tau"].value = 3
    assert page.value.startswith("<svg")
    assert page.value != first
    sliders["tau"].value = 2
    assert page.value == first
    sliders["gain"].value = -1.0
    assert page.value == "<p>No figure: gain is -1.0, expected &lt;a number&gt; &gt;= 0.</p>"


def test_the_readme_has_examples():
    assert len(EXAMPLES) >= 2


@pytest.mark.parametrize("code", EXAMPLES, ids=lambda code: code.splitlines()[0].lstrip("# ")[:40])
def test_readme_example(code: str, capsys):
    exec(compile(code, "README.md", "exec"), {})
    printed = capsys.readouterr().out
    assert printed
    assert "nan" not in printed
