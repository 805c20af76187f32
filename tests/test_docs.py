"""What the docs generate or promise: the table of imports, links to files, the length of the README."""

import re
from pathlib import Path

import pytest

from tests.support import rooms

ROOT = Path(__file__).parents[1]
PAGES = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("realmodel/*/README.md")]


def test_the_table_of_imports_is_the_code_s():
    """`python -m tests.support.rooms` prints the block."""
    page = (ROOT / "docs/architecture.md").read_text()
    block = page.split("<!-- rooms -->")[1].split("<!-- /rooms -->")[0]
    assert block.strip() == rooms.table()


def test_no_room_imports_one_that_stands_below_it():
    """An independent reading of the order that import-linter checks."""
    places = list(rooms.imports())
    for name, others in rooms.imports().items():
        assert all(places.index(other) < places.index(name) for other in others), name


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_every_file_that_a_page_names_is_there(page: Path):
    named = re.findall(
        r"(?<![\w/.-])((?:sandbox|realmodel|tests|docs|notebooks|benchmarks)/[\w./-]*\w)", page.read_text()
    )
    missing = {name for name in named if not (ROOT / name).exists() and not list(ROOT.glob(name + "*"))}
    assert not missing


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150


def test_every_module_that_is_imported_exists_also_in_code_inside_strings():
    """No linter sees the code of a subprocess, a script or a page."""
    named = re.compile(r"(?:from|import|python3? -m) ((?:sandbox|realmodel|benchmarks|tests)(?:\.\w+)+)")
    folders = [
        path for path in ROOT.iterdir() if path.is_dir() and not path.name.startswith(".") and path.name != "runs"
    ]
    files = [ROOT / "Makefile", *ROOT.glob("*.md")]
    files += [
        path for folder in folders for kind in ("py", "md", "sh", "toml", "yaml") for path in folder.rglob(f"*.{kind}")
    ]
    found = {(name, path) for path in files for name in named.findall(path.read_text())}
    assert len(found) > 500
    missing = []
    for name, path in sorted(found):
        place = ROOT.joinpath(*name.split("."))
        if not (place.with_suffix(".py").exists() or (place / "__init__.py").exists()):
            missing.append(f"{path.relative_to(ROOT)}: {name}")
    assert missing == []
