"""What nobody should write, drawn at random by a seed: values of any type at any depth."""

from __future__ import annotations

import datetime
import random
import string
from typing import Any

NUMBERS = (
    *(0, -1, 1, 2, 3, 7, 16, 1024, -(10**6), 10**6, 10**9, 2**31, 2**32, 2**63 - 1, 2**63, 10**18),
    *(10**40, -(10**40), 0.0, -0.0, 0.5, 1.0, -1.5, 1e-9, 1e9, 1e18, -1e18, 1e308, 5e-324),
    *(float("nan"), float("inf"), float("-inf")),
)
TEXTS = (
    *("", " ", "x", "0", "-1", "1e9", "1e999", "nan", ".inf", "true", "null", "~", "~nobody/x"),
    *("auto", "none", "a" * 300, "a/" * 3000, "d/" + "é" * 200 + "/x", "\0", "a\0b", "\ud800"),
    *(
        "\udcff.jsonl",
        "../..",
        "/",
        ".",
        "//",
        "a:b",
        "a:b:c",
        ":",
        "::",
        "model:",
        "task:",
        "task:x",
    ),
    *("reasoning_gym:x", "x.jsonl", "x.parquet", "/dev/null", "/dev/zero.jsonl", "/proc/self/mem"),
    *(
        "👩‍👩‍👧",
        "\u202e",
        "\x1b[2J",
        "a\nb",
        "\t",
        "{}",
        "[",
        "]",
        "[1",
        "*a",
        "&a",
        "!!int x",
        "%",
    ),
    *(
        "2020-01-01",
        "2020-13-45",
        "12:30:45",
        "0x",
        "0b",
        "_",
        "1_0",
        "<<",
        "?",
        "-",
        "- -",
        "{a: b}",
    ),
    *("os:system", "os.path", "json:loads", "no.such.module:f", "x.py:f", ".:f", "..:f", "a b:c d"),
    *("(" * 50, "[a-", "(?P<", "*", "x" * 5000, "-" * 40),
)


def text(draw: random.Random) -> str:
    """Draw a text, well known or not."""
    if draw.random() < 0.7:
        return draw.choice(TEXTS)
    letters = string.printable + "é中\u200b\ud83d\ue000\U0001f600"
    return "".join(draw.choices(letters, k=draw.randrange(12)))


def value(draw: random.Random, depth: int = 0) -> Any:
    """Draw what YAML may hold."""
    kind = draw.randrange(10 if depth < 4 else 7)
    if kind < 3:
        return draw.choice(NUMBERS)
    if kind < 5:
        return text(draw)
    if kind == 5:
        return draw.choice((True, False, None))
    if kind == 6:
        return draw.choice((datetime.date(2020, 1, 1), b"\xff", datetime.datetime(1, 1, 1)))
    if kind == 7:
        return [value(draw, depth + 1) for _ in range(draw.randrange(4))]
    if kind == 8:
        return {key(draw): value(draw, depth + 1) for _ in range(draw.randrange(4))}
    inner: Any = draw.choice((1, "x"))
    for _ in range(draw.choice((1, 5, 40, 300))):
        inner = [inner] if draw.random() < 0.5 else {"a": inner}
    return inner


def key(draw: random.Random) -> Any:
    """Draw a key of a mapping."""
    odd = (1, 1.5, None, True, datetime.date(2020, 1, 1), float("nan"), (1, 2))
    return draw.choice(odd) if draw.random() < 0.3 else text(draw)
