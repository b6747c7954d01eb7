"""Reading a config strictly from YAML files, and writing it back."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from spmdrl.config.fields import Config
from spmdrl.config.other_frameworks import in_other_frameworks
from spmdrl.config.ranges import PathForm
from spmdrl.config.tree import (
    build,
    convert,
    fields_of,
    hints,
    leaves,
    same_name,
    sections,
    settings,
    unknown_key,
)
from spmdrl.config.yaml_text import plain_data
from spmdrl.errors import Refusal, describe
from spmdrl.imports import near_file
from spmdrl.run_files import CONFIG, read_bytes

_FEW = 8
_Dumper = getattr(yaml, "CSafeDumper", yaml.SafeDumper)


def load_yaml(*paths: str | Path) -> Config:
    """Read YAML files strictly; the fields of a later one override those of the ones before.

    Returns: Config with defaults where the files are silent; not yet validated.
    Raises: Refusal listing every unknown key of a file (with the nearest known one) and every value
        of a wrong type.
    """
    found: dict[str, Any] = {}
    for path in map(Path, paths):
        found |= _fields_of(_tree_of(path), where=f"config file {path}")
    return build(found)


def _tree_of(path: Path) -> dict[str, Any]:
    if wrong := PathForm().problem(str(path)):
        raise Refusal(f"config file {describe(str(path))} {wrong}")
    if path.is_dir():
        raise Refusal(f"config file {path} is a folder; name a file in it")
    if not path.exists():
        raise Refusal(f"config file {path} does not exist{near_file(path)}")
    tree = plain_data(_text_of(path), file=str(path)) or {}
    if not isinstance(tree, dict):
        raise Refusal(f"config file {path}: expected a mapping of fields, got {describe(tree)}")
    return tree


def _text_of(path: Path) -> str:
    try:
        return read_bytes(path, CONFIG).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = 1 + error.object.count(b"\n", 0, error.start)
        raise Refusal(
            f"config file {path}: line {line}: not UTF-8 text (byte {error.start}: {error.reason})"
        ) from None
    except OSError as error:
        raise Refusal(f"config file {path} cannot be read: {error.strerror}") from None


def from_tree(tree: Mapping[str, Any], *, where: str = "config") -> Config:
    """Return the config of nested mappings, as YAML has them.

    Args:
        where: the place of the mappings, for messages.
    Raises: as `load_yaml`.
    """
    return build(_fields_of(tree, where=where))


def _fields_of(tree: Mapping[str, Any], *, where: str) -> dict[str, Any]:
    """Return {field: value} of nested mappings."""
    found: dict[str, Any] = {}
    problems: list[str] = []
    for name, value in leaves(tree, problems=problems).items():
        if _is_foreign(name, value):
            problems += _foreign_problems(name, value)
            continue
        with noted(problems, name):
            found[name] = checked(name, value)
    if problems:
        raise Refusal(problem_list(where, problems))
    return found


def _is_foreign(name: str, value: Any) -> bool:
    """Return whether a mapping is a section of another program's config, and no misspelled section
    of ours."""
    if name in settings() or name in sections() or not isinstance(value, dict) or not value:
        return False
    section, _, key = name.rpartition(".")
    own = list(hints(sections()[section])) if section in sections() else []
    is_misspelled = difflib.get_close_matches(key, own, n=1, cutoff=0.7)
    return bool(in_other_frameworks(name)) or not is_misspelled


def _foreign_problems(name: str, value: Mapping[Any, Any]) -> list[str]:
    """Return the name here of each field of another program's section, and last the fields that
    have none."""
    problems = []
    unknown = []
    for field, _ in _leaves_below(name, value):
        other = in_other_frameworks(field)
        near = same_name(field)
        if other:
            problems.append(f"{field}: unknown key; {other}")
        elif near:
            problems.append(f"{field}: unknown key; that is {near} here")
        else:
            unknown.append(field.removeprefix(f"{name}."))
    if unknown:
        more = f" and {len(unknown) - _FEW} more" if len(unknown) > _FEW else ""
        problems.append(
            f"{name}: is no section here, and nothing here is called "
            f"{', '.join(unknown[:_FEW])}{more}; leave it out"
        )
    return problems


def _leaves_below(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield (dotted name, value) of the values in nested mappings."""
    if not isinstance(value, dict) or not value:
        yield name, value
        return
    for key, own in value.items():
        yield from _leaves_below(f"{name}.{key}", own)


@contextlib.contextmanager
def noted(problems: list[str], name: str) -> Iterator[None]:
    """Append the message of a Refusal that is raised inside to the problems."""
    try:
        yield
    except Refusal as error:
        problems.append(f"{name if len(name) <= 100 else describe(name)}: {error}")


def checked(name: str, value: Any) -> Any:
    """Return the value of a field. Raises: Refusal for another type or an unknown name."""
    if name in sections():
        known = ", ".join(fields_of(name))
        raise Refusal(f"expected a mapping of fields, got {describe(value)}; known: {known}")
    if name not in settings():
        raise Refusal(unknown_key(name))
    return convert(value, settings()[name])


def as_flow(value: Any) -> str:
    """Return a value as YAML on one line, as a person writes it in a config."""
    text = yaml.dump(value, Dumper=_Dumper, default_flow_style=True, width=10**6).strip()
    # YAML ends a document that is a single number or word with `...`.
    return text.removesuffix("\n...")


def dump(cfg: Config) -> str:
    """Return the resolved config as YAML that `load_yaml` reads back to an equal Config."""

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {k: plain(v) for k, v in value.items()}
        return [plain(v) for v in value] if isinstance(value, (list, tuple)) else value

    return yaml.dump(plain(dataclasses.asdict(cfg)), Dumper=_Dumper, sort_keys=False)


def problem_list(where: str, problems: list[str]) -> str:
    lines = [f"{where}: {len(problems)} problem{'s' * (len(problems) > 1)}"]
    return "\n".join(lines + [f"  - {problem}" for problem in problems])
