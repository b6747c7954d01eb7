"""Count the lines of code of two revisions, in one layout.

    python benchmarks/code_lines.py 0a5ae62 HEAD

Docstrings, comments and blank lines do not count. Both trees are laid out by the same `ruff format`
first, since a formatter's habits are worth more lines than most changes. Beside the lines stand the
number of `try:` blocks outside tests, and of syntax-tree nodes in thousands, which no layout moves.
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
            text, top = path.read_text(), path.relative_to(folder).parts[0]
            found[f"code lines, {top}"] += code_lines(text)
            found["code lines, all"] += code_lines(text)
            nodes = [*ast.walk(ast.parse(text))]
            found["syntax nodes, thousands"] += len(nodes)
            if top != "tests":
                found["try blocks outside tests"] += sum(isinstance(n, ast.Try) for n in nodes)
    found["syntax nodes, thousands"] //= 1000
    return found


def main() -> None:
    """Print both revisions and the ratio of the second to the first."""
    before, after = map(measure, sys.argv[1:3])
    print(f"{'':28}{sys.argv[1]:>10}{sys.argv[2]:>10}{'ratio':>8}")
    for name in sorted(before | after):
        ratio = f"{after[name] / before[name]:.2f}" if before[name] else ""
        print(f"{name:28}{before[name]:>10}{after[name]:>10}{ratio:>8}")


if __name__ == "__main__":
    main()
