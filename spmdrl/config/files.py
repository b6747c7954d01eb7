"""Reading a config strictly from YAML files, and writing it back."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
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
from spmdrl.config.yaml_text import key_lines, plain_data
from spmdrl.errors import Refusal, describe
from spmdrl.imports import near_file
from spmdrl.run_files import CONFIG, read_bytes

_FEW = 8
_Dumper = getattr(yaml, "CSafeDumper", yaml.SafeDumper)


def load_yaml(*paths: str | Path) -> Config:
    """Read YAML files strictly; the fields of a later one override those of the ones before.

    A file may name another one as its `base`, by a path relative to its own folder. It overrides
    the fields of its base. Mappings of options are merged, where null removes an option of the
    base, and an empty mapping removes all.

    Returns: Config with defaults where the files are silent; not yet validated.
    Raises: Refusal listing every unknown key of a file (with the nearest known one) and every value
        of a wrong type, each with its line; and for bases that form a cycle.
    """
    return build(load_fields(*paths).values)


@dataclass(frozen=True)
class FileFields:
    """What config files set."""

    values: dict[str, Any]
    """{dotted name of a field: its value}"""
    places: dict[str, str]
    """{dotted name of a field, or of an option in it: `FILE, line N` that sets it}"""


def load_fields(*paths: str | Path) -> FileFields:
    """Read YAML files as `load_yaml` does, and keep the place of each value."""
    values: dict[str, Any] = {}
    places: dict[str, str] = {}
    for path in map(Path, paths):
        found = _with_bases(path, above=())
        values |= _checked_fields(found.values, where=f"config file {path}", places=found.places)
        places |= found.places
    return FileFields(values, places)


def _with_bases(path: Path, *, above: tuple[Path, ...]) -> FileFields:
    """Return what a file and its bases say, not yet checked.

    Args:
        above: the files whose base it is, in order.
    """
    where = f"config file {path}"
    if above:
        where += f" (base of {above[-1]})"
    text = _text_of(path, where=where)
    tree = _tree_of(text, path, where=where)
    lines = key_lines(text)
    found = FileFields({}, {})
    if "base" in tree:
        base = _base_of(path, tree.pop("base"), line=lines["base"])
        chain = (*above, path)
        if any(base.resolve() == other.resolve() for other in chain):
            names = " -> ".join(map(str, (*chain, base)))
            raise Refusal(
                f"config file {path}, line {lines['base']}: base: a cycle of files, {names}; take "
                "`base` out of one of them"
            )
        found = _with_bases(base, above=chain)
    problems: list[str] = []
    for name, value in leaves(tree, problems=problems).items():
        found.values[name] = _merged(found.values.get(name), value)
    if problems:
        raise Refusal(problem_list(where, problems))
    places = {name: f"{path}, line {line}" for name, line in lines.items()}
    return FileFields(found.values, found.places | places)


def _base_of(path: Path, base: Any, *, line: int) -> Path:
    if not isinstance(base, str) or not base:
        raise Refusal(
            f"config file {path}, line {line}: base: expected the path of one config file, got "
            f"{describe(base)}"
        )
    return path.parent / base


def _merged(base: Any, own: Any) -> Any:
    """Return a value over that of the base: mappings are merged, everything else is replaced."""
    if not isinstance(base, dict) or not isinstance(own, dict) or not own:
        return own
    merged = base | {name: _merged(base.get(name), value) for name, value in own.items()}
    removed = {name for name in base.keys() & own.keys() if own[name] is None}
    return {name: value for name, value in merged.items() if name not in removed}


def _tree_of(text: str, path: Path, *, where: str) -> dict[str, Any]:
    tree = plain_data(text, file=str(path)) or {}
    if not isinstance(tree, dict):
        raise Refusal(f"{where}: expected a mapping of fields, got {describe(tree)}")
    return tree


def _text_of(path: Path, *, where: str) -> str:
    if wrong := PathForm().problem(str(path)):
        raise Refusal(f"config file {describe(str(path))} {wrong}")
    if path.is_dir():
        raise Refusal(f"{where} is a folder; name a file in it")
    if not path.exists():
        raise Refusal(f"{where} does not exist{near_file(path)}")
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
    problems: list[str] = []
    values = leaves(tree, problems=problems)
    if problems:
        raise Refusal(problem_list(where, problems))
    return build(_checked_fields(values, where=where, places={}))


def _checked_fields(
    values: Mapping[str, Any], *, where: str, places: Mapping[str, str]
) -> dict[str, Any]:
    """Return {field: value} of what files say. Raises: Refusal with each problem and its place."""
    found: dict[str, Any] = {}
    problems: list[str] = []
    for name, value in values.items():
        if _is_foreign(name, value):
            problems += _foreign_problems(name, value)
            continue
        with noted(problems, name):
            found[name] = checked(name, value)
    if problems:
        raise Refusal(problem_list(where, [placed(problem, places) for problem in problems]))
    return found


def placed(problem: str, places: Mapping[str, str]) -> str:
    """Return a problem, `field: what`, with the place of its field at the end where it has one."""
    name = problem.partition(":")[0]
    while name and name not in places:
        name = name.rpartition(".")[0]
    return f"{problem} ({places[name]})" if name else problem


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
    return yaml.dump(_plain(dataclasses.asdict(cfg)), Dumper=_Dumper, sort_keys=False)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    return [_plain(v) for v in value] if isinstance(value, (list, tuple)) else value


def dump_places(cfg: Config, places: Mapping[str, str]) -> str:
    """Return the resolved config as `dump` does, each value with its place in a comment.

    A value without a comment is a default.

    Args:
        places: {dotted name: place}, as `FileFields` has them.
    """
    return "\n".join(_lines_with_places(dataclasses.asdict(cfg), places, prefix=""))


def _lines_with_places(
    tree: Mapping[str, Any], places: Mapping[str, str], *, prefix: str
) -> Iterator[str]:
    indent = "  " * prefix.count(".")
    for key, value in tree.items():
        name = f"{prefix}{key}"
        comment = f"  # {places[name]}" if name in places else ""
        if isinstance(value, dict) and value:
            yield f"{indent}{as_flow(key)}:"
            yield from _lines_with_places(value, places, prefix=f"{name}.")
        else:
            yield f"{indent}{as_flow(key)}: {as_flow(_plain(value))}{comment}"


def problem_list(where: str, problems: list[str]) -> str:
    lines = [f"{where}: {len(problems)} problem{'s' * (len(problems) > 1)}"]
    return "\n".join(lines + [f"  - {problem}" for problem in problems])
