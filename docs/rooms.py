"""The rooms of spmdrl and which imports which, read off the source.

`python docs/rooms.py` writes the picture in docs/architecture.md again;
tests/repository/test_structure.py holds the order of the rooms and compares the picture.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
ORDER = tuple(
    tuple(level.split("="))
    for level in [
        "errors",
        "run_files=value_forms=columns",
        "sampling_masks=model_inputs",
        "types=imports=plain=run_folder",
        "journal",
        "config",
        "algorithms",
        "sandbox",
        "world",
        "same_run",
        "data",
        "model",
        "exchange=credit",
        "rewards=environments",
        "agents",
        "workers",
        "engine",
        "train",
        "roles",
        "sync",
        "rollout",
        "report",
        "checkpoint",
        "certificate",
        "evaluate",
        "check",
        "api",
        "tools",
    ]
)
"""From the ground up: a room imports from rooms of earlier entries alone."""
LEVELS = {room: level for level, rooms in enumerate(ORDER) for room in rooms}
_BEGIN, _END = "```mermaid\n", "```\n"


@dataclass(frozen=True)
class Import:
    """One import statement's way from one module of ours to another."""

    path: Path
    line: int
    module: str
    """Dotted name without `spmdrl.`, e.g. `train.trainer`."""
    imported: str


def modules() -> dict[str, Path]:
    """Return {dotted name without `spmdrl.`: file} of the package."""
    package = ROOT / "spmdrl"
    names = {path: path.relative_to(package).with_suffix("") for path in package.rglob("*.py")}
    dotted = {path: ".".join(name.parts).removesuffix("__init__") for path, name in names.items()}
    return {name.rstrip("."): path for path, name in dotted.items()}


def imports() -> Iterator[Import]:
    """Yield every import of a module of ours by another: inside functions and for types too."""
    known = modules()
    for module, path in known.items():
        for node in ast.walk(ast.parse(path.read_text())):
            for name in _imported(node, known):
                if name != module:
                    yield Import(path, node.lineno, module, name)


def imports_of(path: Path) -> set[str]:
    """Return the modules of ours that one file imports, inside functions too."""
    known = modules()
    return {
        name for node in ast.walk(ast.parse(path.read_text())) for name in _imported(node, known)
    }


def _imported(node: ast.AST, known: dict[str, Path]) -> list[str]:
    if isinstance(node, ast.Import):
        names = [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
        inner = [f"{node.module}.{alias.name}" for alias in node.names]
        # `from package import module` runs the package's own file too.
        names = [node.module, *inner]
    else:
        return []
    own = [name.removeprefix("spmdrl.") for name in names if name.startswith("spmdrl.")]
    return sorted({name for name in own if name in known})


def room_of(module: str) -> str:
    """Return the room of a module: the first part of its name."""
    return module.split(".")[0]


def picture() -> str:
    """Return the rooms as a Mermaid graph: an arrow to each room imported, but for those that
    another arrow's end imports itself."""
    uses: dict[str, set[str]] = {room: set() for room in LEVELS}
    for one in imports():
        room, other = room_of(one.module), room_of(one.imported)
        if room in uses and other in uses and room != other:
            uses[room].add(other)
    uses["train.py"] = {room_of(name) for name in imports_of(ROOT / "train.py")}
    reached: dict[str, set[str]] = {}
    for room, direct in uses.items():  # those that it imports stand before it
        reached[room] = direct.union(*(reached[other] for other in direct))
    lines = ["graph TD", "    train_py[train.py]"]
    for room in reversed(uses):
        direct = uses[room] - set().union(*(reached[other] for other in uses[room]))
        lines += [f"    {room} --> {other}" for other in sorted(direct)]
    return "\n".join(lines).replace("    train.py ", "    train_py ") + "\n"


def page_with(graph: str, page: str) -> str:
    """Return a Markdown page with `graph` in place of its Mermaid graph."""
    before, _, rest = page.partition(_BEGIN)
    return before + _BEGIN + graph + _END + rest.partition(_END)[2]


def main() -> None:
    """Write the picture into docs/architecture.md."""
    path = ROOT / "docs" / "architecture.md"
    path.write_text(page_with(picture(), path.read_text()))


if __name__ == "__main__":
    main()
