"""Which tests prove which features together, by the marker `proves` of the tests."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

TESTS = Path(__file__).resolve().parents[3] / "tests"
SHIPPED = Path(__file__).with_name("proofs.jsonl")
"""The same for an installation without the tests."""


@dataclass(frozen=True)
class FeatureProof:
    """A test that runs some features together."""

    test: str
    """ROOM/FILE::FUNCTION."""
    features: tuple[str, ...]


def proofs(tests: Path = TESTS) -> list[FeatureProof]:
    """Return what the tests prove; without the tests, the content of the shipped file."""
    if tests.is_dir():
        files = sorted(tests.rglob("test_*.py"))
        return [proof for file in files for proof in _read_file(file, file.relative_to(tests))]
    lines = SHIPPED.read_text(encoding="utf-8").splitlines()
    return [FeatureProof(own["test"], tuple(own["features"])) for own in map(json.loads, lines)]


def as_lines(proved: list[FeatureProof]) -> str:
    """Return proofs as text for the shipped file."""
    return "".join(json.dumps(asdict(proof)) + "\n" for proof in proved)


def _read_file(file: Path, name: Path) -> Iterator[FeatureProof]:
    """Yield the proofs of a file, without importing it.

    A marker is a decorator of its test, or part of a case in the decorator `parametrize`.
    """
    text = file.read_text(encoding="utf-8")
    if "mark.proves" not in text:
        return
    for node in ast.parse(text).body:
        if not (isinstance(node, ast.FunctionDef) and node.name.startswith("test_")):
            continue
        for call in _marker_calls(node):
            names = tuple(ast.literal_eval(argument) for argument in call.args)
            yield FeatureProof(f"{name.as_posix()}::{node.name}", names)


def _marker_calls(test: ast.FunctionDef) -> Iterator[ast.Call]:
    for decorator in test.decorator_list:
        for call in ast.walk(decorator):
            if isinstance(call, ast.Call) and _is_marker(call.func):
                yield call


def _is_marker(node: ast.expr) -> bool:
    return isinstance(node, ast.Attribute) and ast.unparse(node) == "pytest.mark.proves"
