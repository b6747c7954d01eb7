"""Run the commands of a page's worked examples, and put in what they print.

    python -m spmdrl plan_examples docs/plans.md configs/gpu_*.yaml

In Markdown an example is a fenced block that begins with `$ python -m spmdrl plan`; in a config it
is such a line of a comment, `#     $ ...`, and the comment's lines of that depth below it.
"""

from __future__ import annotations

import contextlib
import io
import re
import shlex
from functools import partial
from pathlib import Path
from typing import Annotated

import tyro

from spmdrl.tools.commands import plan, run_command

_EXAMPLE = re.compile(r"```\n\$ (python -m spmdrl plan .*?[^\\]\n)(.*?)```", re.DOTALL)

_COMMENT = re.compile(r"^#     \$ (python -m spmdrl plan .*\n)(?:#     .*\n)*", re.MULTILINE)


def examples(text: str) -> list[tuple[str, str]]:
    """Return (command, what stands below it) of every example."""
    return _EXAMPLE.findall(text)


def output(command: str) -> str:
    """Return what a command of the page prints, refusals included."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        with contextlib.redirect_stderr(printed):
            plan.main(shlex.split(command.replace("\\\n", " "))[4:])
    return printed.getvalue()


def renewed(text: str) -> str:
    """Return the page, or config, with new output."""
    text = _COMMENT.sub(lambda found: f"#     $ {found[1]}{_commented(output(found[1]))}", text)
    return _EXAMPLE.sub(lambda found: f"```\n$ {found[1]}{output(found[1])}```", text)


def _commented(lines: str) -> str:
    return "".join(f"#     {line}\n" for line in lines.splitlines())


def renew(pages: Annotated[list[Path], tyro.conf.Positional]) -> None:
    """Renew the examples of Markdown pages and configs."""
    for page in pages:
        page.write_text(renewed(page.read_text()))


main = partial(run_command, "plan_examples", renew)
