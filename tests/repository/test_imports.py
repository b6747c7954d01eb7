"""Every import of a module of ours names what is there, also inside functions and in texts.

mypy passes over an import of a module that it does not find, and an import inside a function fails
only when it runs.
"""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TRACKED = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True)
PATHS = [ROOT / name for name in TRACKED.stdout.split("\n") if (ROOT / name).is_file()]
SOURCES = [path for path in PATHS if path.suffix == ".py"]
FOLDERS = {folder for path in SOURCES for folder in path.parents} - {*ROOT.parents, ROOT}
IN_TEXT = re.compile(r"\bfrom (?:spmdrl|tests|benchmarks)[\w.]* import (?:\*|\w[\w, ]*)")
"""Programs in texts of tests, in pages and in the arguments of processes."""


def test_every_import_names_a_module_and_what_it_has() -> None:
    found = [one for path in SOURCES for one in _faults(path, path.read_text())]
    assert not found, "\n".join(found)


def test_every_import_in_a_text_names_a_module_and_what_it_has() -> None:
    texts = {path: path.read_text() for path in PATHS if path.suffix in (".py", ".md")}
    found = [
        fault
        for path, text in texts.items()
        for line in IN_TEXT.findall(text)
        if "nowhere" not in line  # the cases below
        for fault in _faults(path, line)
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ("def late():\n    from spmdrl.nowhere import a", "spmdrl.nowhere is no module"),
        ("import spmdrl.config.nowhere as a", "spmdrl.config.nowhere is no module"),
        ("from spmdrl.errors import nowhere", "spmdrl.errors has no nowhere"),
        ("from tests.helpers import nowhere", "tests.helpers has no nowhere"),
        ("from spmdrl.check import dry_run, rules", ""),
        ("import tests.helpers.runs", ""),
        ("from start import nowhere", "start has no nowhere"),
        ("from start import header", ""),
        ("from spmdrl.api import Trainer", ""),
        ("from nowhere import a", ""),  # of a library
    ],
)
def test_a_slip_is_found(line: str, fault: str) -> None:
    path = ROOT / "benchmarks" / "rewards.py"
    assert _faults(path, line) == ([f"benchmarks/rewards.py: {fault}"] if fault else [])


def _faults(path: Path, text: str) -> list[str]:
    """Return what imports in a text name that is not there, if the text stood in a file."""
    place = path.relative_to(ROOT)
    # A script finds what is beside it, a module of a package does not.
    is_script = not (path.parent / "__init__.py").exists()
    folders = (ROOT, path.parent) if is_script else (ROOT,)
    return [
        f"{place}: {fault}"
        for node in ast.walk(ast.parse(text))
        for fault in _faults_of(node, folders)
    ]


def _faults_of(node: ast.AST, folders: tuple[Path, ...]) -> Iterator[str]:
    if isinstance(node, ast.Import):
        for alias in node.names:
            if _is_ours(alias.name, folders) and not _module(alias.name, folders):
                yield f"{alias.name} is no module"
    if not isinstance(node, ast.ImportFrom) or not _is_ours(node.module or "", folders):
        return
    assert node.module and not node.level, "ruff refuses relative imports"
    module = _module(node.module, folders)
    if module is None:
        yield f"{node.module} is no module"
        return
    for alias in node.names:
        is_module = _module(f"{node.module}.{alias.name}", folders)
        if alias.name != "*" and not is_module and alias.name not in _names(module):
            yield f"{node.module} has no {alias.name}"


def _is_ours(name: str, folders: tuple[Path, ...]) -> bool:
    return bool(name) and _module(name.split(".")[0], folders) is not None


@cache
def _module(name: str, folders: tuple[Path, ...]) -> Path | None:
    """Return the file of a module, or the folder of a package without one."""
    for folder in folders:
        path = folder.joinpath(*name.split("."))
        if path.with_suffix(".py").is_file():
            return path.with_suffix(".py")
        if (path / "__init__.py").is_file():
            return path / "__init__.py"
        if path in FOLDERS:
            return path
    return None


@cache
def _names(path: Path) -> set[str]:
    """Return what a module defines or imports, not inside functions and classes."""
    if path.is_dir():
        return set()
    found: set[str] = set()

    def add(node: ast.AST) -> None:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            found.add(node.name)
            return
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            found.update(alias.asname or alias.name.split(".")[0] for alias in node.names)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        for child in ast.iter_child_nodes(node):
            add(child)

    add(ast.parse(path.read_text()))
    return found
