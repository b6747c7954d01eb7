"""Train by train.py: that of this folder, or else the one that came with the package.

    spmdrl train --config FILE [--any.field value]

It takes the flags of train.py, and runs as one rank where torchrun or srun starts it. A train.py
in the current folder is yours to edit, and is run if there is one. Otherwise it is the one that
came with the package.
"""

from __future__ import annotations

import os
import site
import sys
from pathlib import Path

import spmdrl
from spmdrl.check.settings import parse
from spmdrl.errors import Refusal, say
from spmdrl.tools.commands import typed
from spmdrl.world.launch import known_rank

_PLACES = (
    Path(spmdrl.__file__).parents[1],
    Path(sys.prefix, "share", "spmdrl"),
    Path(site.getuserbase(), "share", "spmdrl"),
)
"""Where train.py is in a checkout, and where a wheel puts it."""


def main(argv: list[str] | None = None) -> int:
    """Become the program train.py; return 2 if there is none."""
    argv = list(sys.argv[1:] if argv is None else argv)
    if {"-h", "--help"} & {*argv}:
        parse(argv, prog=f"{typed('train')} --config FILE")
    try:
        program = find_program()
    except (Refusal, OSError) as error:
        say(f"train: {error}", file=sys.stderr)
        return 2
    if program.parent != Path.cwd() and known_rank() in ("0", "?"):
        say(f"train: runs {program}; there is no train.py here", file=sys.stderr)
    # The same process, as `python -u train.py`, which torchrun starts: a launcher sees one.
    os.execv(sys.executable, [sys.executable, "-u", str(program), *argv])


def find_program() -> Path:
    """Return the train.py that a run in the current folder takes.

    Raises: Refusal when there is none, or that of the current folder is of another program.
    """
    here = Path("train.py").absolute()
    if here.is_file():
        if "spmdrl" not in here.read_text(errors="replace"):
            raise Refusal(
                f"{here} is no train.py of spmdrl: it does not name spmdrl; start it by python, or "
                "start this command in another folder"
            )
        return here
    for place in _PLACES:
        if (place / "train.py").is_file():
            return place / "train.py"
    raise Refusal(
        f"there is no train.py in {here.parent}, nor in {', '.join(map(str, _PLACES))}; copy it "
        "here from the source of this version, or install the package again"
    )
