"""The user's own code in a run: the program that was started, the functions that its config names,
and the files in the same folders that these import."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import re
import sys
from collections.abc import Iterator
from functools import partial
from modulefinder import ModuleFinder
from pathlib import Path

import spmdrl
from spmdrl.config import Config, flatten
from spmdrl.imports import attempt

PROGRAM = "program"
"""Name of the started program, whose file may have any name."""
_NAMED = re.compile(r"(.+\.py|[A-Za-z_][\w.]*):\w+")
"""`path/file.py:NAME` and `module:NAME`."""
_PACKAGE = Path(spmdrl.__file__).resolve().parent


def started_program() -> Path | None:
    """Return the file that this process was started with; None if it was none, as under
    `python -m spmdrl`."""
    program = Path(sys.argv[0])
    return program.resolve() if program.is_file() else None


def user_files(cfg: Config) -> dict[str, Path]:
    """Return the files of a user's own code by their part in the run: `program`,
    `rewards.functions: my_rewards.py`, and `program: helpers.py` for a file that it imports."""
    program = started_program()
    roots = dict(_named(cfg)) | ({PROGRAM: program} if program else {})
    files: dict[str, Path] = {}
    for name, root in roots.items():
        if not root.is_file():
            continue
        files[name] = root
        for path in _imported(root):
            files[f"{name}: {path.relative_to(root.parent)}"] = path
    return files


def digest(path: Path) -> str:
    """Return the first 16 digits of a file's sha256."""
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


def _named(cfg: Config) -> Iterator[tuple[str, Path]]:
    """Yield the files that a config names, under `field: name`."""
    for field, value in flatten(cfg).items():
        # Quotes become line ends, which the pattern does not cross: a match is within one text.
        for place in _NAMED.findall(json.dumps(value).replace('"', "\n")):
            path = Path(place).expanduser()
            if not place.endswith(".py"):
                kinds = (ImportError, ValueError)
                spec, _ = attempt(partial(importlib.util.find_spec, place), kinds)
                # Path() is a folder, which `user_files` leaves out.
                path = Path(spec.origin) if spec and spec.origin else Path()
            if _PACKAGE not in path.resolve().parents:
                yield f"{field}: {Path(place).name}", path.resolve()


def _imported(root: Path) -> list[Path]:
    """Return the files in a file's own folder that it imports, and those that they import."""
    # Modules of other folders are not found, and no code is run.
    finder = ModuleFinder(path=[str(root.parent)], excludes=[_PACKAGE.name])
    attempt(lambda: finder.run_script(str(root)), (SyntaxError, ValueError, OSError))
    names = {getattr(module, "__file__", None) for module in finder.modules.values()}
    paths = {Path(name) for name in names if name}
    return sorted(path for path in paths if path.suffix == ".py" and path != root)
