"""Read YAML text as plain data, and refuse values that no config can hold, by line and column."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import yaml

from spmdrl.errors import Refusal

if TYPE_CHECKING:
    from yaml import SafeLoader as _BaseLoader
else:
    _BaseLoader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

_MOST_CHARACTERS = 2**20
_DEEPEST = 32
_MOST_VALUES = 10**5
_LARGEST = 2**63
_MERGE = "tag:yaml.org,2002:merge"


def plain_data(text: str, *, file: str = "") -> Any:
    """Return the data of a YAML text: mappings, lists, texts, numbers, booleans, None, dates.

    Args:
        file: its path, for messages; empty for a value of the command line.
    Raises: Refusal with line and column for a text that is no YAML, has a key twice, has an integer
        beyond 64 bits or a value that its type cannot hold, or is too large or too deep.
    """
    what = f"config file {file} is not valid YAML" if file else f"{text!r:.80} is not valid YAML"
    if len(text) > _MOST_CHARACTERS:
        raise Refusal(f"{what}: {len(text)} characters; a config has at most {_MOST_CHARACTERS}")
    if half := next((c for c in text if "\ud800" <= c <= "\udfff"), ""):
        raise Refusal(f"{what}: {half!r} is half of a character")
    try:
        _check_depth(text)  # before the loader, which recurses in C
        value = yaml.load(text, _Loader)
    except yaml.MarkedYAMLError as error:
        raise Refusal(f"{what}: {_located(error)}{_tab(text, error)}") from None
    except yaml.reader.ReaderError as error:
        line = 1 + text.count("\n", 0, error.position)
        raise Refusal(f"{what}: line {line}: {error.reason}, {chr(error.character)!r}") from None
    _count(value, set(), what=what)
    return value


def key_lines(text: str) -> dict[str, int]:
    """Return {dotted name: line} of the keys in nested mappings of a valid YAML text."""
    found: dict[str, int] = {}
    _note_lines(yaml.compose(text, _BaseLoader), "", found)
    return found


def _note_lines(node: yaml.Node | None, prefix: str, found: dict[str, int]) -> None:
    merged: list[yaml.Node] = []
    for key, value in node.value if isinstance(node, yaml.MappingNode) else ():
        if key.tag == _MERGE:
            merged += value.value if isinstance(value, yaml.SequenceNode) else [value]
        elif isinstance(key, yaml.ScalarNode):
            name = f"{prefix}{key.value}"
            found.setdefault(name, key.start_mark.line + 1)
            _note_lines(value, f"{name}.", found)
    for other in merged:  # its keys only count where the mapping has none of its own
        _note_lines(other, prefix, found)


def _located(error: yaml.MarkedYAMLError) -> str:
    mark = error.problem_mark or error.context_mark
    parts = [error.context, error.problem]
    place = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
    return place + ", ".join(part for part in parts if part)


def _tab(text: str, error: yaml.MarkedYAMLError) -> str:
    """Return that the line of an error, or the one before, is indented by a tab; else empty."""
    mark = error.problem_mark or error.context_mark
    if mark is None:
        return ""
    lines = text.splitlines()
    for at in (mark.line, mark.line - 1):
        line = lines[at] if 0 <= at < len(lines) else ""
        if "\t" in line[: len(line) - len(line.lstrip())]:
            return f"; line {at + 1} is indented by a tab, where YAML takes spaces alone"
    return ""


def _check_depth(text: str) -> None:
    depth = 0
    for event in yaml.parse(text, _BaseLoader):
        depth += isinstance(event, yaml.CollectionStartEvent)
        depth -= isinstance(event, yaml.CollectionEndEvent)
        if depth > _DEEPEST:
            problem = f"lists and mappings are nested more than {_DEEPEST} deep"
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=event.start_mark)


def _count(value: Any, above: set[int], *, what: str) -> int:
    """Return the number of values, and count a value again for each alias of it: aliases of aliases
    are small in memory and can be endless to read."""
    if not isinstance(value, (dict, list, set, tuple)):
        return 1
    if id(value) in above:
        raise Refusal(f"{what}: an alias names the value that it is in, which has no end")
    if len(above) > _DEEPEST:
        raise Refusal(f"{what}: its aliases are nested more than {_DEEPEST} deep")
    own = [*value, *value.values()] if isinstance(value, dict) else list(value)
    total = 1
    for part in own:
        total += _count(part, above | {id(value)}, what=what)
        if total > _MOST_VALUES:
            raise Refusal(f"{what}: it holds more than {_MOST_VALUES} values, with each alias")
    return total


class _Loader(_BaseLoader):
    """The safe loader, which also refuses a repeated key and a value that its type cannot hold."""

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            value = super().construct_object(node, deep)
        except yaml.YAMLError:
            raise
        except Exception as error:  # constructors raise any error of the parsers that they call
            kind = node.tag.rpartition(":")[2]
            problem = f"{getattr(node, 'value', '')!r:.60} is no {kind}: {_first_line(error)}"
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark) from None
        if isinstance(value, int) and abs(value) > _LARGEST:
            problem = "a whole number of more than 64 bits"
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark)
        return value

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> Any:
        seen: set[tuple[str, str]] = set()
        for key, _ in node.value if isinstance(node, yaml.MappingNode) else ():
            if not isinstance(key, yaml.ScalarNode) or key.tag == _MERGE:
                continue
            if (key.tag, key.value) in seen:
                problem = f"the key {key.value!r:.60} is here twice"
                raise yaml.MarkedYAMLError(problem=problem, problem_mark=key.start_mark)
            seen.add((key.tag, key.value))
        return super().construct_mapping(node, deep)


def _first_line(error: Exception) -> str:
    # Python advises to raise a limit of its own for integers of many digits.
    return str(error).partition("; use sys.")[0].partition("\n")[0]
