"""The words of a shell script's commands, read without running anything."""

from __future__ import annotations

import ast
import operator
import re
import shlex
from collections.abc import Callable

_ASSIGNS = re.compile(r"(?:export\s+|local\s+|readonly\s+)?(\w+)=(.*)", re.S)
_OPERATORS: dict[type, Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,
    ast.FloorDiv: operator.floordiv,
}


def commands(text: str) -> list[list[str]]:
    """Return the words of each command, with the variables that the script itself sets.

    It knows assignments, arrays, `$X`, `${X}`, `${X:-default}`, `${X[@]}` and `$((1024 * 2))`.
    `$HOME` becomes `~`. What else only a shell can tell, such as `$(hostname)` or the branches of
    an `if`, stays as it is written, with its `$`. Where a variable is set twice, the later one
    counts.
    """
    known: dict[str, list[str]] = {"HOME": ["~"]}
    found = []
    for line in _lines(text):
        assigns = _ASSIGNS.fullmatch(line)
        if assigns and assigns[2].startswith("("):
            known[assigns[1]] = _words(assigns[2][1:].rpartition(")")[0], known)
            continue
        words = _words(line, known)
        if words[:1] == ["export"]:
            words = words[1:]
        while words and (own := _ASSIGNS.fullmatch(words[0])):
            known[own[1]] = [own[2]]
            words = words[1:]
        if words:
            found.append(words)
    return found


def _lines(text: str) -> list[str]:
    """Return logical lines: continued ones joined, comments removed, quotes and arrays closed."""
    lines = []
    waiting = ""
    for line in text.splitlines():
        if re.match(r"\s*#", line):
            continue
        line = re.sub(r"\s#\s.*$", "", line).strip()
        waiting += line.removesuffix("\\") + (" " if line.endswith("\\") else "")
        is_array = re.match(r"\w+=\(", waiting) and waiting.count("(") > waiting.count(")")
        if line.endswith("\\") or is_array or _is_open(waiting):
            waiting += " "
            continue
        if waiting.strip():
            lines.append(waiting.strip())
        waiting = ""
    return [*lines, waiting.strip()] if waiting.strip() else lines


def _is_open(text: str) -> bool:
    """Return whether a quote is not closed."""
    try:
        shlex.split(text, comments=False)
    except ValueError:
        return True
    return False


def _words(text: str, known: dict[str, list[str]]) -> list[str]:
    """Return the words of a line with its variables replaced."""
    whole = re.compile(r"""(?<=\s)"?\$\{(\w+)\[@\]\}"?(?=\s)""")
    text = whole.sub(
        lambda m: " ".join(map(shlex.quote, known[m[1]])) if m[1] in known else m[0], f" {text} "
    )
    try:
        words = shlex.split(_hidden(text))
    except ValueError:
        words = text.split()
    return [_replaced(word, known) for word in words]


def _hidden(text: str) -> str:
    """Return text in which `$((...))` and `$(...)` are one word each, and `$` in single quotes
    stays a letter."""
    text = re.sub(r"\$\(\((.*?)\)\)", lambda m: "$((" + m[1].replace(" ", "") + "))", text)
    return re.sub(r"\$\(([^()]*)\)", lambda m: "$(" + m[1].replace(" ", "\x00") + ")", text)


def _replaced(word: str, known: dict[str, list[str]]) -> str:
    """Return a word with its known variables replaced, the innermost of `${A:-${B:-c}}` first."""

    def value(match: re.Match[str]) -> str:
        name = match["braced"] or match["plain"]
        if name in known:
            return " ".join(known[name]).replace("$", "\x01")  # not replaced a second time
        default = match["default"]
        return match[0] if default is None else default.strip("\"'")

    variable = re.compile(r"\$(?:\{(?P<braced>\w+)(?::?-(?P<default>[^{}]*))?\}|(?P<plain>\w+))")
    word = word.replace("\x00", " ")
    before = ""
    while before != word:
        before = word
        word = variable.sub(value, word)
    return re.sub(r"\$\(\((.*?)\)\)", lambda m: _computed(m, known), word.replace("\x01", "$"))


def _computed(match: re.Match[str], known: dict[str, list[str]]) -> str:
    """Return the value of `$((...))`; its text if it is no arithmetic of known numbers."""
    text = re.sub(r"[A-Za-z_]\w*", lambda m: " ".join(known.get(m[0], [m[0]])), match[1])

    def of(node: ast.AST) -> int:
        if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
            return _OPERATORS[type(node.op)](of(node.left), of(node.right))
        if isinstance(node, ast.Constant) and type(node.value) is int:
            return node.value
        raise ValueError

    try:
        return str(of(ast.parse(text, mode="eval").body))
    except (ValueError, SyntaxError, ZeroDivisionError):
        return match[0]
