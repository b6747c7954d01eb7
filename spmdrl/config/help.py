"""`--help`: every field of a config, by sections, with type, value and what it says of itself."""

from __future__ import annotations

import ast
import inspect
import shutil
import textwrap
import typing
from typing import Any, Literal

from spmdrl.config.fields import Config
from spmdrl.config.tree import bounds, flatten, kinds, nearest_field, sections, settings
from spmdrl.errors import Refusal


def show_help(cfg: Config, words: list[str], *, prog: str, about: str) -> None:
    """Print the help, or that of one section or field.

    Args:
        cfg: whose values are shown.
        words: behind `--help`; the first one may name a section.
        prog, about: for the head.
    Raises: Refusal for a section that does not exist.
    """
    asked = words[0].lstrip("-").replace("-", "_") if words else ""
    if asked and asked not in sections() and asked not in settings():
        raise Refusal(f"--help {asked}: no such section or field{nearest_field(asked)}")
    if not asked:
        print(f"usage: {prog} [--SECTION.FIELD VALUE ...]\n\n{about}--config FILE")
        print(
            "    YAML file to start from, e.g. one of configs/. Every field below overrides it;\n"
            "    the values shown are the file's. `--help SECTION`, e.g. model.memory, shows one.\n"
            "    Given several times, a later file overrides the fields of those before it.\n"
            "--version\n    prints the versions of this program and of what it stands on."
        )
    values = flatten(cfg)
    width = max(60, shutil.get_terminal_size((100, 24)).columns)
    for section, cls in sections().items():
        docs = field_docs(cls)
        names = {f"{section}.{own}".lstrip("."): own for own in docs}
        start = f"{asked}." if asked else ""
        shown = [n for n in names if n in settings() and f"{n}.".startswith(start)]
        if shown and section:
            print("\n" + _wrapped(f"{section}: {cls.__doc__}", width, indent=0))
        for name in shown:
            form = f"{_form(settings()[name])} {bounds().get(name, '')}".rstrip()
            print(f"  --{name} {form}  [{_shown(values[name])}]")
            print(_wrapped(docs[names[name]], width, indent=6))


def _wrapped(text: str, width: int, *, indent: int) -> str:
    space = " " * indent
    return textwrap.fill(
        " ".join(text.split()), width, initial_indent=space, subsequent_indent=space
    )


def field_docs(cls: type) -> dict[str, str]:
    """Return {field: the docstring under it} of a dataclass, "" where there is none."""
    (tree,) = ast.parse(inspect.getsource(cls)).body
    docs: dict[str, str] = {}
    name = ""
    for line in tree.body if isinstance(tree, ast.ClassDef) else ():
        if name and isinstance(line, ast.Expr) and isinstance(line.value, ast.Constant):
            docs[name] = str(line.value.value)
        name = ast.unparse(line.target) if isinstance(line, ast.AnnAssign) else ""
        docs |= {name: ""} if name else {}
    return docs


def _form(hint: Any) -> str:
    origin = typing.get_origin(hint)
    args = typing.get_args(hint)
    if origin is Literal:
        return "|".join(args)
    if len(kinds(hint)) > 1:
        return "|".join(map(_form, args))
    if origin is tuple:
        return f"{_form(args[0])} ..."
    return {bool: "true|false", int: "INT", float: "FLOAT", str: "TEXT"}.get(hint, "{NAME: VALUE}")


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return " ".join(map(str, value))
    return str(value)
