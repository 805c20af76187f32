"""Every notebook runs from top to bottom, its claims asserted; so does every Python example of the README."""

import re
import runpy
from pathlib import Path

import matplotlib.pyplot as plt
import pytest

ROOT = Path(__file__).parent.parent
EXAMPLES = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)


@pytest.mark.parametrize("notebook", sorted((ROOT / "notebooks").glob("*.py")), ids=lambda path: path.stem)
def test_notebook(notebook: Path, tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(notebook))
    plt.close("all")


def test_the_readme_has_examples():
    assert len(EXAMPLES) >= 2


@pytest.mark.parametrize("code", EXAMPLES, ids=lambda code: code.splitlines()[0].lstrip("# ")[:40])
def test_readme_example(code: str, capsys):
    exec(compile(code, "README.md", "exec"), {})
    printed = capsys.readouterr().out
    assert printed
    assert "nan" not in printed
