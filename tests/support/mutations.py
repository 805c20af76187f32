"""Every sign of the formula modules flipped once, and the first test that notices: `python -m tests.support.mutations`.

A tool, not a test. The mutants come from the syntax tree, so no list of them can go stale: + and -, unary minus, the
direction of a comparison, min and max. Each is written to a copy of the tree, where the module's tests run until the
first one fails, in a process forked from one that has imported the libraries already. Prints a Markdown table and
exits with status 1 where a mutant survived or a module's tests fail without one.
"""

import ast
import multiprocessing
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

os.environ |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "1", "POLARS_MAX_THREADS": "1"}

import hypothesis
import hypothesis.extra.numpy
import matplotlib.figure  # noqa: F401, shared by every fork
import numba  # noqa: F401
import polars  # noqa: F401
import pytest
import scipy.optimize
import scipy.sparse.linalg
import scipy.stats  # noqa: F401
import torch  # noqa: F401

ROOT = Path(__file__).parents[2]
LIMIT = 120  # seconds for one mutant: one that never ends is noticed too
# Test files by module, both as paths in the tree without "test_"; the test that most likely notices first
TESTS = {
    "corrections/ratios": "corrections/rules corrections/presets corrections/centring metrics/estimators",
    "corrections/rejections": "corrections/rules corrections/presets",
    "corrections/rules": "corrections/rules corrections/presets",
    "corrections/combinations": "corrections/rules corrections/presets corrections/losses",
    "corrections/losses": "corrections/losses corrections/centring corrections/presets",
    "corrections/resync": "corrections/resync tabular/simulate",
    "metrics/estimators": "metrics/estimators metrics/summary",
    "tabular/exact": "tabular/exact experiments/exact_report tabular/recursions tabular/simulate",
    "tabular/recursions": "tabular/recursions tabular/exact",
    "tabular/bias": "tabular/bias",
    "tabular/matrices": "tabular/matrices",
    "tabular/kernels": "tabular/simulate",
    "tabular/simulate": "tabular/simulate bad_arguments",
    "tabular/policy": "corrections/resync experiments/exact_report tabular/problems tabular/simulate",
    "tabular/enumeration": "experiments/exact_report tabular/exact",
    "theory/lag": "theory/lag",
    "theory/delay": "theory/delay",
    "theory/levels": "theory/levels experiments/predict",
    "theory/collapse": "theory/collapse theory/levels",
    "experiments/staleness": "experiments/staleness",
}
FLIPS = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Lt: ast.Gt, ast.Gt: ast.Lt, ast.LtE: ast.GtE, ast.GtE: ast.LtE}
NAMES = {"min": "max", "max": "min", "minimum": "maximum", "maximum": "minimum", "argmin": "argmax", "argmax": "argmin"}
TEXT = (ast.JoinedStr, ast.Tuple, ast.List)


def mutants(source: str) -> Iterator[tuple[int, str, str, str]]:
    """(line, expression, expression with one sign flipped, whole source with it)"""
    for index in range(sum(1 for _ in ast.walk(ast.parse(source)))):
        tree = ast.parse(source)
        node = list(ast.walk(tree))[index]
        before = ast.unparse(node)
        if flip(node) and not inside(tree, node):
            yield node.lineno, before, ast.unparse(node), ast.unparse(ast.fix_missing_locations(tree))


def flip(node: ast.AST) -> bool:
    """Flips the sign of this node, where it has one."""
    match node:
        case ast.BinOp(op=ast.Add() | ast.Sub(), left=left, right=right):
            if any(
                isinstance(x, TEXT) or (isinstance(x, ast.Constant) and isinstance(x.value, str)) for x in (left, right)
            ):
                return False
            node.op = FLIPS[type(node.op)]()
        case ast.AugAssign(op=ast.Add() | ast.Sub()):
            node.op = FLIPS[type(node.op)]()
        case ast.Compare(ops=[ast.Lt() | ast.Gt() | ast.LtE() | ast.GtE(), *_]):
            node.ops[0] = FLIPS[type(node.ops[0])]()
        case ast.UnaryOp(op=ast.USub()):
            node.op = ast.UAdd()
        case ast.Call(func=ast.Attribute(attr=name)) if name in NAMES:
            node.func.attr = NAMES[name]
        case ast.Call(func=ast.Name(id=name)) if name in NAMES:
            node.func.id = NAMES[name]
        case _:
            return False
    return True


def inside(tree: ast.AST, node: ast.AST) -> bool:
    """Whether a minus counts an axis or a place from the end, which is no sign of a formula."""
    if not isinstance(node, ast.UnaryOp):
        return False
    for parent in ast.walk(tree):
        if isinstance(parent, ast.keyword) and parent.arg in ("axis", "axes") and node in ast.walk(parent):
            return True
        if (
            isinstance(parent, ast.Subscript)
            and node in ast.walk(parent.slice)
            and isinstance(node.operand, ast.Constant)
        ):
            return True
        if isinstance(parent, ast.Call) and isinstance(parent.func, ast.Attribute):
            if parent.func.attr in ("reshape", "sum", "mean", "expand_dims") and node in parent.args:
                return True
    return False


class First:
    """Remembers the first failing test."""

    name = ""

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed and not self.name:
            self.name = report.nodeid.removeprefix("tests/")

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed and not self.name:
            self.name = f"{report.nodeid.removeprefix('tests/')} (cannot be imported)"


def check(folder: str, files: list[str], pipe) -> None:
    """In a fork: the first failing test of the copy, or "" where all pass."""
    os.chdir(folder)
    sys.path.insert(0, folder)
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 1)
    os.dup2(quiet, 2)
    phases = (hypothesis.Phase.explicit, hypothesis.Phase.generate)  # no shrinking: one failure says enough
    few = {"max_examples": 15, "phases": phases, "database": None, "derandomize": True, "deadline": None}
    hypothesis.settings.register_profile("mutants", **few)
    first = First()
    options = ["-x", "-q", "-p", "no:cacheprovider", "-m", "not slow", "--hypothesis-profile=mutants", "--tb=no"]
    status = pytest.main([*options, *files], plugins=[first])
    pipe.send(first.name or ("" if status == 0 else f"pytest exit status {int(status)}"))
    pipe.close()
    os._exit(0)


def verdict(folder: Path, files: list[str]) -> str:
    """The first failing test, "" for none."""
    ours, theirs = multiprocessing.Pipe(False)
    child = multiprocessing.get_context("fork").Process(target=check, args=(str(folder), files, theirs))
    child.start()
    theirs.close()
    try:
        found = ours.recv() if ours.poll(LIMIT) else f"no end within {LIMIT} s"
    except EOFError:
        found = "the interpreter died"
    child.kill()
    child.join()
    return found


def main(names: list[str]) -> int:
    bad, start = 0, time.perf_counter()
    print("| module:line | mutation | noticed by |\n|---|---|---|", flush=True)
    with tempfile.TemporaryDirectory() as kept:
        for name in names:
            copy = Path(kept) / name
            for part in ("sandbox", "tests", "realmodel", "benchmarks", "notebooks", "pyproject.toml", "README.md"):
                (shutil.copytree if (ROOT / part).is_dir() else shutil.copy)(ROOT / part, copy / part)
            paths = [Path("tests/sandbox") / test for test in TESTS[name].split()]
            files = [str(path.with_name(f"test_{path.name}.py")) for path in paths]
            path = copy / "sandbox" / f"{name}.py"
            source = path.read_text()
            unmutated = verdict(copy, files)
            if unmutated:
                print(f"| {name} | none | **{unmutated} fails without a mutation** |", flush=True)
                bad += 1
                continue
            for line, before, after, mutated in mutants(source):
                path.write_text(mutated)
                found = verdict(copy, files)
                bad += not found
                change = f"`{shorter(before)}` -> `{shorter(after)}`".replace("|", "\\|")
                print(f"| {name}:{line} | {change} | {found or '**survives**'} |", flush=True)
            shutil.rmtree(copy)
    print(f"\n{bad} survivors, {time.perf_counter() - start:.0f} s", flush=True)
    return int(bad > 0)


def shorter(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= 70 else text[:67] + "..."


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:] or list(TESTS)))
