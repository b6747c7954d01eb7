"""Reading a config strictly, from a file and flags, and writing it back."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import difflib
import re
import shlex
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import yaml

from spmdrl.config.fields import Config
from spmdrl.config.options import shown
from spmdrl.config.other_frameworks import in_other_frameworks
from spmdrl.config.ranges import PathForm
from spmdrl.config.tree import (
    build,
    convert,
    flatten,
    is_near,
    kinds,
    leaves,
    nearest_field,
    same_name,
    sections,
    settings,
)
from spmdrl.config.yaml_text import plain_data
from spmdrl.errors import Refusal
from spmdrl.run_files import CONFIG, read_bytes

_FEW = 8
_Dumper = getattr(yaml, "CSafeDumper", yaml.SafeDumper)


def read(argv: list[str], *, prog: str, about: str = "", default: Config | None = None) -> Config:
    """Read `--config FILE` and command-line overrides; the values are not checked yet.

    Of several files a later one overrides the fields of those before it, and a flag those of all.

    Args:
        argv: arguments without the program name.
        prog, about: of the help.
        default: what to start from without `--config`.
    Raises: Refusal with every problem listed, one per line; SystemExit(0) after the help.
    """
    paths, rest = take_config_flags(argv)
    cfg = load_yaml(*paths) if paths else default or Config()
    if asked := {"-h", "--help"}.intersection(rest):
        from spmdrl.config.help import show_help

        show_help(cfg, rest[rest.index(asked.pop()) + 1 :], prog=prog, about=about)
        raise SystemExit(0)
    return with_flags(cfg, rest)


def refuse(problems: list[str], *, paths: list[str], flags: list[str]) -> None:
    """Raise the problems of a config, one per line, as a Refusal; return if there are none.

    Args:
        paths, flags: what it was read from, both perhaps empty; a value may be of any of them.
    """
    if problems:
        where = " and ".join([*paths, *(["flags"] if flags else [])])
        raise Refusal(_problem_list(f"config of {where or 'defaults alone'}", problems))


def take_config_flags(argv: list[str]) -> tuple[list[str], list[str]]:
    """Return the files that `--config` names, in order, and the other arguments."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--config", nargs="?", action="append", default=[])
    found, rest = parser.parse_known_args(argv)
    if None in found.config:
        raise Refusal("--config needs a file name after it")
    return found.config, rest


def _problem_list(where: str, problems: list[str]) -> str:
    lines = [f"{where}: {len(problems)} problem{'s' * (len(problems) > 1)}"]
    return "\n".join(lines + [f"  - {problem}" for problem in problems])


# --------------------------------------------------------------------------- files


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
        raise Refusal(f"config file {shown(str(path))} {wrong}")
    if path.is_dir():
        raise Refusal(f"config file {path} is a folder; name a file in it")
    if not path.exists():
        near = difflib.get_close_matches(path.name, [p.name for p in path.parent.glob("*.yaml")])
        hint = f"; did you mean {path.parent / near[0]}?" if near else ""
        raise Refusal(f"config file {path} does not exist{hint}")
    tree = plain_data(_text_of(path), file=str(path)) or {}
    if not isinstance(tree, dict):
        raise Refusal(f"config file {path}: expected a mapping of fields, got {shown(tree)}")
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
        where: they stand, for messages.
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
        with _noted(problems, name):
            found[name] = _checked(name, value)
    if problems:
        raise Refusal(_problem_list(where, problems))
    return found


def _is_foreign(name: str, value: Any) -> bool:
    """Return whether a mapping is a section of another program's config: none of ours, nor one of
    ours with a slip of the pen."""
    is_ours = name in settings() or name in sections()
    if is_ours or not isinstance(value, dict) or not value:
        return False
    return bool(in_other_frameworks(name)) or not is_near(name)


def _foreign_problems(name: str, value: Mapping[Any, Any]) -> list[str]:
    """Return what each field of another program's section is here, and last those that are nothing
    here."""
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
    """Yield (dotted name, value) of what stands in nested mappings."""
    if not isinstance(value, dict) or not value:
        yield name, value
        return
    for key, own in value.items():
        yield from _leaves_below(f"{name}.{key}", own)


@contextlib.contextmanager
def _noted(problems: list[str], name: str) -> Iterator[None]:
    """Put a Refusal among the problems."""
    try:
        yield
    except Refusal as error:
        problems.append(f"{name if len(name) <= 100 else shown(name)}: {error}")


def _checked(name: str, value: Any) -> Any:
    if name in sections():
        own = [field for field in settings() if field.rpartition(".")[0] == name]
        raise Refusal(f"expected a mapping of fields, got {shown(value)}; known: {', '.join(own)}")
    if name not in settings():
        other = in_other_frameworks(name)
        raise Refusal(f"unknown key{f'; {other}' if other else nearest_field(name)}")
    return convert(value, settings()[name])


def _flow(value: Any) -> str:
    text = yaml.dump(value, Dumper=_Dumper, default_flow_style=True, width=10**6).strip()
    return text.removesuffix("\n...")


def dump(cfg: Config) -> str:
    """Return the resolved config as YAML that `load_yaml` reads back to an equal Config."""

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {k: plain(v) for k, v in value.items()}
        return [plain(v) for v in value] if isinstance(value, (list, tuple)) else value

    return yaml.dump(plain(dataclasses.asdict(cfg)), Dumper=_Dumper, sort_keys=False)


# --------------------------------------------------------------------------- flags


def with_flags(cfg: Config, argv: list[str]) -> Config:
    """Return a config with the fields that flags name: `--batch.group-size 4`.

    A value is read as in a file, but for text that stands as it is. Lists are several words;
    what is true or false may be named alone, `--data.no-shuffle` for false.

    Raises: Refusal listing every problem.
    """
    found: dict[str, Any] = {}
    problems: list[str] = []
    for flag, words in _split(argv):
        if not flag:
            problems.append(_no_flag((words or ["--"])[0]))
            continue
        name = flag.replace("-", "_")
        text = words
        section, _, own = name.rpartition(".")
        positive = f"{section}.{own.removeprefix('no_')}".lstrip(".")
        can_be_false = positive in settings() and bool in kinds(settings()[positive])
        if name not in settings() and can_be_false and not words:
            name = positive
            text = ["false"]
        with _noted(problems, f"--{name}"):
            value = _flag_value(name, text)
            if name in found and found[name] != value:
                raise Refusal(
                    f"stands here twice, with {shown(found[name])} and with {shown(value)}; leave "
                    "one out"
                )
            found[name] = value
    if problems:
        raise Refusal(_problem_list("flags", problems))
    return build(flatten(cfg) | found)


def _split(argv: list[str]) -> list[tuple[str, list[str]]]:
    """Return flags, each with the words after it; words that are meant for flags and are none come
    alone, after an empty one."""
    found: list[tuple[str, list[str]]] = []
    for word in argv:
        if word.startswith("--"):
            flag, is_there, value = word[2:].partition("=")
            found.append((flag, [value] if is_there else []))
        elif found and found[-1][0] and not _is_meant_for_a_flag(word):
            found[-1][1].append(word)
        elif found and not found[-1][0] and not _is_meant_for_a_flag(word):
            continue  # the value of a word that is no flag
        else:
            found.append(("", [word]))
    return found


_DASHES = {
    "-": "begins with one hyphen",
    "\u2010": "begins with a hyphen of print (U+2010)",
    "\u2011": "begins with a hyphen that does not break (U+2011)",
    "\u2012": "begins with a dash (U+2012)",
    "\u2013": "begins with an en dash (U+2013), as word processors write two hyphens",
    "\u2014": "begins with an em dash (U+2014), as word processors write two hyphens",
    "\u2015": "begins with a bar (U+2015)",
    "\u2212": "begins with a minus sign (U+2212)",
}


def _is_meant_for_a_flag(word: str) -> bool:
    """Return whether a word is a flag of ours in another spelling: `-steps`, `steps=3`."""
    name, has_value = _flag_name(word)
    return (word[0:1] in _DASHES or has_value) and (name in settings() or name == "config")


def _flag_name(word: str) -> tuple[str, bool]:
    """Return the field that a word may mean, and whether `=` follows it."""
    name, equals, _ = word.lstrip("".join(_DASHES) + "+").partition("=")
    return name.replace("-", "_"), bool(equals)


def _no_flag(word: str) -> str:
    """Return what is wrong with a word where a flag is expected."""
    name, has_value = _flag_name(word)
    start = "--" + name.replace("_", "-")
    if word[0:1] in _DASHES and word != word[0]:
        value = f" {word.partition('=')[2]}" if has_value else ""
        return f"{word}: {_DASHES[word[0]]}; flags begin with two plain hyphens: {start}{value}"
    if has_value and re.fullmatch(r"\w+(\.\w+)*", name):
        value = word.partition("=")[2]
        form = "flags are not written NAME=VALUE here but --NAME VALUE"
        if name in settings():
            return f"{word}: {form}: {start} {value}"
        problem = in_other_frameworks(name) or "unknown key" + nearest_field(name)
        return f"{word}: {form}; {name}: {problem}"
    if word.endswith((".yaml", ".yml")):
        return f"{word}: expected a flag, --config {word}"
    return f"{word}: expected a flag, --SECTION.FIELD VALUE"


def _flag_value(name: str, words: list[str]) -> Any:
    hint = settings().get(name)
    value: Any = words
    if (hint is None or typing.get_origin(hint) is dict) and len(words) == 1:
        value = plain_data(words[0])
    if name in sections() and isinstance(value, dict) and value:
        flags = " ".join(_flag(f"{name}.{key}", own) for key, own in value.items())
        raise Refusal(f"is a section, whose fields are flags: {flags}")
    return _checked(name, value) if hint is None else convert(_from_words(words, hint), hint)


def _from_words(words: list[str], hint: Any) -> Any:
    """Return words of the command line as YAML would have the value."""
    if bool in kinds(hint) and not words:
        return True
    of_list = next((kind for kind in kinds(hint) if typing.get_origin(kind) is tuple), None)
    if of_list and len(words) == 1 and words[0].startswith("[") and words[0].endswith("]"):
        return plain_data(words[0])
    if of_list and (len(words) != 1 or str not in kinds(hint)):
        return [w if typing.get_args(of_list)[0] is str else plain_data(w) for w in words]
    if len(words) != 1:
        flags = [f"--{word.replace('_', '-')}" for word in words[1:] if word in settings()]
        meant = f"; flags begin with two hyphens: {', '.join(flags)}" if flags else ""
        raise Refusal(f"expected one value, got {' '.join(words)[:160] or 'none'}{meant}")
    is_text = str in kinds(hint) or typing.get_origin(hint) is Literal
    return words[0] if is_text else plain_data(words[0])


def _flag(name: str, value: Any) -> str:
    """Return a value as a flag, for messages."""
    words = value if isinstance(value, list) else [value]
    texts = [w if isinstance(w, str) else _flow(w) for w in words]
    return " ".join([f"--{name}", *map(shlex.quote, texts)])
