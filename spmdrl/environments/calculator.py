"""The tool `calculator`: arithmetic, bounded in time and size."""

from __future__ import annotations

import ast
import math
import operator
import re
import warnings
from collections.abc import Callable

_MAX_CHARS = 300
_MAX_BITS = 4096
_OPERATORS: dict[type, Callable] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_SIGNS: dict[type, Callable] = {ast.UAdd: operator.pos, ast.USub: operator.neg}


def _round(value: int | float, digits: int = 0) -> int | float:
    # round(5, -10**9) would compute ten to that power.
    if abs(digits) > 15:
        raise ValueError(f"round: digits must be from -15 to 15, got {digits}")
    return round(value, digits) if digits else round(value)


_NAMES = {"pi": math.pi, "e": math.e}
_OF_MATH = ("sqrt", "exp", "log", "log10", "sin", "cos", "tan", "floor", "ceil")
_FUNCTIONS: dict[str, Callable] = {name: getattr(math, name) for name in _OF_MATH}
_FUNCTIONS |= {"abs": abs, "round": _round, "min": min, "max": max}
_THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?!\d))(?![^()]*\))")
_SYMBOLS = str.maketrans({"\u00d7": "*", "\u00f7": "/", "\u2212": "-", "^": "**"})


def calculator(expression: str) -> str:
    """Compute the value of an arithmetic expression.

    Args:
        expression: For example 2*(3+4)**2 or sqrt(2)/3. Knows + - * / // % **, parentheses, pi, e,
            sqrt, abs, round, exp, log, log10, sin, cos, tan, min, max, floor and ceil.
    """
    text = expression.strip()
    # Check this first: the search for thousands separators looks ahead from each comma.
    if len(text) > _MAX_CHARS:
        raise ValueError(f"the expression has {len(text)} characters, above {_MAX_CHARS}")
    text = _THOUSANDS.sub("", text.translate(_SYMBOLS))
    try:
        # The parser warns about texts such as `1if`, which are refused below.
        with warnings.catch_warnings(action="ignore"):
            tree = ast.parse(text, mode="eval")
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        raise ValueError("this is not an arithmetic expression") from None
    value = _value(tree.body)
    if isinstance(value, complex) or not abs(value) < math.inf:
        raise ValueError("the result is not a finite real number")
    return str(value) if isinstance(value, int) else f"{value:.12g}"


def _value(node: ast.expr) -> int | float:
    if isinstance(node, ast.Constant) and isinstance(node.value, (int, float)):
        if not isinstance(node.value, bool):
            return node.value
    if isinstance(node, ast.Name) and node.id in _NAMES:
        return _NAMES[node.id]
    if isinstance(node, ast.UnaryOp) and type(node.op) in _SIGNS:
        return _SIGNS[type(node.op)](_value(node.operand))
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow):
        return _power(_value(node.left), _value(node.right))
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return _check_bits(_OPERATORS[type(node.op)](_value(node.left), _value(node.right)))
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and not node.keywords:
        if node.func.id in _FUNCTIONS:
            return _check_bits(_FUNCTIONS[node.func.id](*map(_value, node.args)))
        raise ValueError(f"unknown function {node.func.id}; known: {', '.join(_FUNCTIONS)}")
    raise ValueError(f"{ast.unparse(node)[:40]!r} is not arithmetic")


def _power(base: int | float, exponent: int | float) -> int | float:
    # Check the size before computing the power: 9**9**9 has 370 million digits. The product is at
    # most twice the bits of the result; `_check_bits` does the exact check.
    if isinstance(base, int) and isinstance(exponent, int) and exponent > 0:
        if base.bit_length() * exponent > 2 * _MAX_BITS:
            raise ValueError(f"the result is above 2**{_MAX_BITS}")
    value = base**exponent
    if isinstance(value, complex):
        raise ValueError("the result is not a real number")
    return _check_bits(value)


def _check_bits(value: int | float) -> int | float:
    if isinstance(value, int) and value.bit_length() > _MAX_BITS:
        raise ValueError(f"the result is above 2**{_MAX_BITS}")
    return value
