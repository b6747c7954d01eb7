"""The user's code in a run.

This is the program that was started, the files of functions that the config names, and the files
that these import from their own folders.
"""

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
"""Name of the program that was started, for any file name."""
_NAMED = re.compile(r"(.+\.py|[A-Za-z_][\w.]*):\w+")
"""`path/file.py:NAME` and `module:NAME`."""
_PACKAGE = Path(spmdrl.__file__).resolve().parent


def started_program() -> Path | None:
    """Return the file of the program that this process runs; None under `python -m spmdrl`."""
    program = Path(sys.argv[0])
    return program.resolve() if program.is_file() else None


def user_files(cfg: Config) -> dict[str, Path]:
    """Return the files of a user's code by their role in the run.

    Returns: e.g. {"program": ..., "rewards.functions: my_rewards.py": ...,
        "program: helpers.py": ...}; the last is a file that the program imports.
    """
    program = started_program()
    roots = dict(_config_files(cfg)) | ({PROGRAM: program} if program else {})
    files: dict[str, Path] = {}
    for name, root in roots.items():
        if not root.is_file():
            continue
        files[name] = root
        for path in _imported_files(root):
            files[f"{name}: {path.relative_to(root.parent)}"] = path
    return files


def digest(path: Path) -> str:
    """Return the first 16 digits of a file's sha256."""
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


def _config_files(cfg: Config) -> Iterator[tuple[str, Path]]:
    """Yield (`field: name`, file) for the files that a config names."""
    for field, value in flatten(cfg).items():
        # Replace quotes by line ends, which the pattern does not cross, so that a match is within
        # one text.
        for place in _NAMED.findall(json.dumps(value).replace('"', "\n")):
            path = Path(place).expanduser()
            if not place.endswith(".py"):
                kinds = (ImportError, ValueError)
                spec, _ = attempt(partial(importlib.util.find_spec, place), kinds)
                # Path() is a folder, which `user_files` leaves out.
                path = Path(spec.origin) if spec and spec.origin else Path()
            if _PACKAGE not in path.resolve().parents:
                yield f"{field}: {Path(place).name}", path.resolve()


def _imported_files(root: Path) -> list[Path]:
    """Return the files that a file imports from its folder, directly or indirectly."""
    # This finds no modules of other folders, and runs no code.
    finder = ModuleFinder(path=[str(root.parent)], excludes=[_PACKAGE.name])
    attempt(lambda: finder.run_script(str(root)), (SyntaxError, ValueError, OSError))
    names = {getattr(module, "__file__", None) for module in finder.modules.values()}
    paths = {Path(name) for name in names if name}
    return sorted(path for path in paths if path.suffix == ".py" and path != root)
