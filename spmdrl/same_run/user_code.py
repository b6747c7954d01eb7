"""The user's own code that a run is made of: the program that was started, what its config names,
and the files beside them that they import."""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import json
import re
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import spmdrl
from spmdrl.config import Config, flatten
from spmdrl.imports import attempt

PROGRAM = "program"
"""What the started program is called, whatever the name of its file."""
_NAMED = re.compile(r"(.+\.py|[A-Za-z_][\w.]*):\w+")
"""`path/file.py:NAME` and `module:NAME`."""
_PACKAGE = Path(spmdrl.__file__).resolve().parent


def started_program() -> Path | None:
    """Return the file that this process was started with; None where it was no file, as under
    `python -m spmdrl`."""
    program = Path(sys.argv[0])
    return program.resolve() if program.is_file() else None


def user_files(cfg: Config) -> dict[str, Path]:
    """Return the files of a user's own code, by what they are to the run: `program`,
    `rewards.functions: my_rewards.py`, and `program: helpers.py` for what one of them imports."""
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
        for place in _NAMED.findall(json.dumps(value).replace('"', "\n")):
            path = Path(place).expanduser()
            if not place.endswith(".py"):
                kinds = (ImportError, ValueError)
                spec, _ = attempt(partial(importlib.util.find_spec, place), kinds)
                path = Path(spec.origin) if spec and spec.origin else Path()
            if _PACKAGE not in path.resolve().parents:
                yield f"{field}: {Path(place).name}", path.resolve()


def _imported(root: Path) -> list[Path]:
    """Return the files in a file's own folder that it imports, and those that they import."""
    found: dict[Path, None] = {}
    left = [root]
    while left:
        for path in _imports_of(left.pop(), folder=root.parent):
            if path not in found and path != root and _PACKAGE not in path.parents:
                found[path] = None
                left.append(path)
    return sorted(found)


def _imports_of(file: Path, *, folder: Path) -> list[Path]:
    """Return the files in a folder that are named by the imports of a file."""
    places = [folder.joinpath(*name.split(".")) for name in _imported_names(file)]
    paths = [path for place in places for path in (place.with_suffix(".py"), place / "__init__.py")]
    return [path for path in paths if path.is_file()]


def _imported_names(file: Path) -> Iterator[str]:
    """Yield the modules that a file imports, and what may be one: `a.b` of `from a import b`."""
    kinds = (SyntaxError, ValueError, OSError)
    tree, _ = attempt(lambda: ast.parse(file.read_bytes()), kinds)
    for node in ast.walk(tree) if tree else ():
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
