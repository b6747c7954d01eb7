"""The names of settings in other frameworks, read from the table in `other_frameworks.md`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

_PAGE = Path(__file__).with_name("other_frameworks.md")


def _rows() -> list[list[str]]:
    """Return the cells of the page's table: names in other programs, the field here, a note."""
    rows = [row for row in _PAGE.read_text(encoding="utf-8").splitlines() if row.startswith("| `")]
    return [[cell.strip() for cell in row.split("|")[1:-1]] for row in rows]


ELSEWHERE = {
    other: f"that is {field.strip('`')} here" + (f" ({note})" if note else "")
    for others, field, note in _rows()
    for other in re.findall("`(.+?)`", others)
} | {
    "model.lora.r": "PEFT's r is rank here",
    "model.lora.lora_alpha": "PEFT's lora_alpha is alpha here",
    "model.lora.target_modules": "PEFT's target_modules is targets here",
    "model.lora.init_lora_weights": "PEFT's init_lora_weights is init here",
    **dict.fromkeys(
        ("model.lora.dropout", "model.lora.lora_dropout"),
        "there is none: logprobs before an update and in it must be equal; leave it out",
    ),
}
"""{name in another program: what to do here}."""


def in_other_frameworks(name: str) -> str:
    """Return the name here of another program's field, for messages; empty for an unknown one.

    Args:
        name: with its sections or without them: `actor.optim.lr`, `learning_rate`.
    """
    parts = name.split(".")
    endings = (".".join(parts[at:]) for at in range(len(parts)))
    return next((ELSEWHERE[ending] for ending in endings if ending in ELSEWHERE), "")


_VALUES = {
    "gpu": "cuda",
    "bf16": "bfloat16",
    "fp16": "float16",
    "half": "float16",
    "fp32": "float32",
    "float": "float32",
    "hf": "transformers",
    "grpo": "rl",
    "ppo": "rl",
    "rloo": "rl",
    "dpo": "preference",
    "kto": "preference",
}


def value_in_other_frameworks(value: object, *, choices: Sequence[str]) -> str:
    """Return the value here for one of other programs, for messages; empty for an unknown one.

    Args:
        choices: values that the field has here.
    """
    own = _VALUES.get(str(value).lower(), "")
    if own not in choices:
        return ""
    method = ", with the method in algorithm.advantage and algorithm.loss"
    return f"that is {own} here" + (method if own in ("rl", "preference") else "")
