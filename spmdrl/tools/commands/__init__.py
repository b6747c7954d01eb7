"""What a person types: `spmdrl NAME`, or `python -m spmdrl NAME`. A module is a command, and its
`main` runs it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import tyro

from spmdrl.errors import Refusal, error_text, say
from spmdrl.world.launch import known_rank


def typed(name: str) -> str:
    """Return a command as the person typed it, for its help."""
    own = f"spmdrl {name}"
    return own if sys.argv[0] == own else f"python -m {own}"


def run_command(name: str, command: Callable[..., Any], argv: Sequence[str] | None = None) -> int:
    """Run a command with the flags of the command line, and print the text that it returns.

    Where several ranks run it, rank 0 prints.

    Args:
        name: of the command.
        command: its function, which returns a text or an exit status, both, or neither.
        argv: arguments; None takes those of the program.
    Returns: the exit status: 2 for what is refused, with the reason on standard error.
    """
    is_first = known_rank() in ("0", "?")
    try:
        answer = tyro.cli(command, prog=typed(name), args=argv)
    except (Refusal, OSError) as error:
        if is_first:
            say(f"{name}: {error_text(error)}", file=sys.stderr)
        return 2
    text, status = answer if isinstance(answer, tuple) else (answer, 0)
    if isinstance(text, int):
        return text
    if isinstance(text, (str, Path)) and is_first:
        say(text, flush=True)
    return status
