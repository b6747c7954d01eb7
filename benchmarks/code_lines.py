"""Count the code of revisions: lines that hold code, and nodes of the syntax tree.

    python benchmarks/code_lines.py 7648945 HEAD
    python benchmarks/code_lines.py 7648945 HEAD --rooms

Docstrings, comments and blank lines do not count. All trees are laid out by the same `ruff format`
first. Nodes are the measure of how much there is: no layout moves them. Nodes per line say how much
a reader has to take in at once. What trains is spmdrl/ without its tools.
"""

from __future__ import annotations

import ast
import io
import subprocess
import sys
import tarfile
import tempfile
import tokenize
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[1]
_NO_CODE = {
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT,
    tokenize.ENDMARKER,
}  # fmt: skip

_WITH_DOCS = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
TOOLS = ("tools", "commands", "plan", "proof", "what_if")
"""Rooms of spmdrl/ that a run which trains does not load; all but the first had these names before
there were tools."""


def code_lines(text: str) -> int:
    """Return the lines of a file that hold code."""
    docs: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, _WITH_DOCS):
            continue
        for line in node.body:
            if isinstance(line, ast.Expr) and isinstance(line.value, ast.Constant):
                docs |= {*range(line.lineno, (line.end_lineno or 0) + 1)}
    code: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in _NO_CODE:
            code |= {*range(token.start[0], token.end[0] + 1)}
    return len(code - docs)


def syntax_nodes(text: str) -> int:
    """Return the nodes of a file's syntax tree, without docstrings."""
    tree = ast.parse(text)
    count = sum(1 for _ in ast.walk(tree))
    for node in ast.walk(tree):
        if isinstance(node, _WITH_DOCS) and ast.get_docstring(node) is not None:
            count -= 2  # the statement and its constant
    return count


def measure(revision: str) -> Counter[str]:
    """Return {measure: count} of one revision of this repository."""
    packed = subprocess.run(
        ["git", "archive", revision], cwd=ROOT, check=True, capture_output=True
    ).stdout
    found: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as folder:
        with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
            archive.extractall(folder, filter="data")
        layout = ["--config", str(ROOT / "pyproject.toml"), "-q", folder]
        subprocess.run([sys.executable, "-m", "ruff", "format", *layout], check=True)
        for path in Path(folder).rglob("*.py"):
            text = path.read_text()
            counts = {"lines": code_lines(text), "nodes": syntax_nodes(text)}
            for group in _groups(path.relative_to(folder)):
                for kind, count in counts.items():
                    found[f"{group}, {kind}"] += count
    return found


def _groups(path: Path) -> list[str]:
    """Return the groups of files that a file counts in."""
    top = path.parts[0]
    if top != "spmdrl":
        return [top]
    room = path.parts[1]
    trains = room not in TOOLS
    return [top, "spmdrl that trains" if trains else "spmdrl/tools", f"room {room}"]


def main() -> None:
    """Print a column for each revision."""
    shows_rooms = "--rooms" in sys.argv
    revisions = [word for word in sys.argv[1:] if word != "--rooms"]
    counts = [measure(revision) for revision in revisions]
    groups = {name.rpartition(", ")[0] for found in counts for name in found}
    print(f"{'':32}" + "".join(f"{revision:>24}" for revision in revisions))
    print(f"{'':32}" + f"{'lines':>8}{'nodes':>8}{'n/line':>8}" * len(revisions))
    for group in sorted(groups):
        if group.startswith("room ") and not shows_rooms:
            continue
        print(f"{group:32}" + "".join(_row(found, group) for found in counts))


def _row(found: Counter[str], group: str) -> str:
    lines = found[f"{group}, lines"]
    nodes = found[f"{group}, nodes"]
    ratio = f"{nodes / lines:.1f}" if lines else ""
    return f"{lines:>8}{nodes:>8}{ratio:>8}"


if __name__ == "__main__":
    main()
