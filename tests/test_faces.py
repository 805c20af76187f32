"""What a face promises of every public name: a docstring with shapes, units and errors, and a test that uses it.

A face is the `__init__.py` of a room. It names modules, or functions and classes; of a module that it names, every
public function counts. Checked in the syntax tree, so that a framework that is not installed is no excuse.
"""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FACES = sorted(path for package in ("sandbox", "realmodel") for path in (ROOT / package).glob("*/__init__.py"))
ARRAY = re.compile(r"\b(ndarray|Array|Tensor)\b")
SHAPE = re.compile(r"\([\w +*()-]+, ?[^)]*\)|\(\.\.\.[^)]*\)|[aA]ny shape|[aA] number|[Ss]calar|state dict")
LOGS = re.compile(r"^(logp|log_weight|log_ratio|log_offset|kl)")
UNIT = re.compile(r"\bnats\b|\blog\b|\bKL\b")
ERRORS = re.compile(r"Raises|BadInput|refused")


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def exported(face: Path) -> list[str]:
    for node in tree(face).body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id == "__all__":
            return ast.literal_eval(node.value)
    return []


def public(module: Path) -> list[ast.FunctionDef | ast.ClassDef]:
    return [
        node
        for node in tree(module).body
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_")
    ]


def promised(face: Path) -> list[tuple[Path, ast.FunctionDef | ast.ClassDef]]:
    """Module and node of every function and class that a face names, or that a module that it names has."""
    names, found = exported(face), []
    for module in sorted(face.parent.glob("*.py")):
        found += [(module, node) for node in public(module) if module.stem in names or node.name in names]
    return found


@cache
def words_of_tests() -> frozenset[str]:
    return frozenset(word for path in (ROOT / "tests").rglob("*.py") for word in re.findall(r"\w+", path.read_text()))


def broken(name: str, node: ast.FunctionDef | ast.ClassDef, module: str = "") -> list[str]:
    """What the docstring of `node` lacks; a unit may stand in that of its `module` instead."""
    said = ast.get_docstring(node) or ""
    if not said:
        return [f"{name} has no docstring"]
    wrong = []
    if isinstance(node, ast.FunctionDef):
        arguments = [*node.args.args, *node.args.kwonlyargs]
        types = [a.annotation for a in arguments if a.annotation] + ([node.returns] if node.returns else [])
        arrays = any(ARRAY.search(ast.unparse(x)) for x in types)
        if arrays and not SHAPE.search(said):
            wrong.append(f"{name}: its docstring gives no shape of its arrays")
        if arrays and any(LOGS.match(a.arg) for a in arguments) and not UNIT.search(said + module):
            wrong.append(f"{name}: its docstring gives no unit of its logarithms")
        raised = [ast.unparse(x.exc) for x in ast.walk(node) if isinstance(x, ast.Raise) and x.exc]
        if any("BadInput" in x for x in raised) and not ERRORS.search(said):
            wrong.append(f"{name}: its docstring does not say that it raises BadInput")
    return wrong


@pytest.mark.parametrize("face", FACES, ids=lambda path: path.parent.name)
def test_a_face_names_what_is_there_and_says_what_happens(face: Path):
    assert ast.get_docstring(tree(face))
    modules = {path.stem for path in face.parent.glob("*.py")} - {"__init__"}
    here = modules | {node.name for module in modules for node in public(face.parent / f"{module}.py")}
    constants = {
        target.id
        for module in modules
        for node in tree(face.parent / f"{module}.py").body
        if isinstance(node, ast.Assign | ast.AnnAssign)
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
        if isinstance(target, ast.Name)
    }
    assert set(exported(face)) <= here | constants


@pytest.mark.parametrize("face", FACES, ids=lambda path: path.parent.name)
def test_docstrings_give_shapes_units_and_errors(face: Path):
    wrong = [
        line
        for module, node in promised(face)
        for line in broken(f"{module.stem}.{node.name}", node, ast.get_docstring(tree(module)) or "")
    ]
    assert wrong == []


@pytest.mark.parametrize("face", FACES, ids=lambda path: path.parent.name)
def test_every_name_of_a_face_is_used_by_a_test(face: Path):
    """A module is used where a test names it or something of it."""
    for name in exported(face):
        module = face.parent / f"{name}.py"
        names = {name} | ({node.name for node in public(module)} if module.exists() else set())
        assert names & words_of_tests(), name


def test_the_check_finds_what_is_missing():
    code = "def f(logp: np.ndarray) -> float:\n    '''Mean.'''\n    raise BadInput('x')"
    node = ast.parse(code).body[0]
    assert isinstance(node, ast.FunctionDef)
    assert len(broken("f", node)) == 3
    node = ast.parse(code.replace("Mean.", "Mean of log pi, nats. (B, T) Raises BadInput: always.")).body[0]
    assert isinstance(node, ast.FunctionDef)
    assert broken("f", node) == []
