"""Reading a config from the command line: `--config FILE` and, by tyro, a flag for each field.

tyro splits the command line and prints the help. A flag allows the same values as a file.
"""

from __future__ import annotations

import argparse
import re
import typing
import unicodedata
from collections import Counter
from collections.abc import Iterator
from dataclasses import field, make_dataclass
from functools import cache, partial
from operator import attrgetter
from typing import Annotated, Any, Literal

import docstring_parser
import tyro
from tyro.constructors import (
    ConstructorRegistry,
    PrimitiveConstructorSpec,
    StructConstructorSpec,
    StructFieldSpec,
    StructTypeInfo,
)

from spmdrl.config.fields import Config
from spmdrl.config.files import as_flow, load_fields, load_yaml, noted, placed, problem_list
from spmdrl.config.tree import (
    bounds_of,
    build,
    convert,
    fields_of,
    flatten,
    hints,
    is_section,
    kinds,
    nearest_field,
    sections,
    settings,
    type_text,
    unknown_key,
)
from spmdrl.config.yaml_text import plain_data
from spmdrl.errors import Refusal

_ABOUT = """--config FILE names a YAML file to start from, e.g. one of configs/. A flag
overrides the file; of several files a later one overrides the earlier ones.
--help SECTION, e.g. model.memory, shows one section; --version prints the
versions of this program and of its libraries."""


def read(
    argv: list[str], *, prog: str, own: type | None = None, default: Config | None = None
) -> Config:
    """Read `--config FILE` and flags; the values are not checked yet.

    Of several files a later one overrides the fields of those before it, and a flag those of all.

    Args:
        argv: arguments without the program name.
        prog: for the help.
        own: a dataclass of further flags, for the help.
        default: the config to start from without `--config`.
    Raises: Refusal with every problem listed, one per line; SystemExit(0) after the help.
    """
    paths, rest = take_config_flags(argv)
    cfg = load_yaml(*paths) if paths else default or Config()
    if asked := {"-h", "--help"}.intersection(rest):
        _show_help(cfg, rest[rest.index(asked.pop()) + 1 :], prog=prog, own=own)
    return with_flags(cfg, rest)


def places_of(argv: list[str]) -> dict[str, str]:
    """Return {dotted name: what sets it}: `FILE, line N` of `--config FILE`, or `flag`."""
    paths, rest = take_config_flags(argv)
    places = load_fields(*paths).places if paths else {}
    flags = {_field(_positive(word)) for word in rest if word.startswith("--")}
    for name in flags & settings().keys():
        # A flag replaces all options of a field.
        places = {own: place for own, place in places.items() if not own.startswith(f"{name}.")}
        places[name] = "flag"
    return places


def refuse(problems: list[str], *, argv: list[str]) -> None:
    """Raise the problems of a config, one per line, as a Refusal; return if there are none.

    Args:
        argv: `--config FILE` and flags that the config is of, for messages; may be empty.
    """
    if problems:
        paths, flags = take_config_flags(argv)
        where = " and ".join([*paths, *(["flags"] if flags else [])])
        places = places_of(argv)
        named = [placed(problem, places) for problem in problems]
        raise Refusal(problem_list(f"config of {where or 'defaults alone'}", named))


def take_config_flags(argv: list[str]) -> tuple[list[str], list[str]]:
    """Return the files that `--config` names, in order, and the other arguments."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--config", nargs="?", action="append", default=[])
    found, rest = parser.parse_known_args(argv)
    if None in found.config:
        raise Refusal("--config needs a file name after it")
    return found.config, rest


# --------------------------------------------------------------------------- tyro

REGISTRY = ConstructorRegistry()
"""How tyro makes flags of a section."""


class _Words(list[str]):
    """The words after a flag."""


@REGISTRY.struct_rule
def _section_rule(info: StructTypeInfo) -> StructConstructorSpec | None:
    """Tell tyro the flags of a section."""
    if info.type not in sections().values():
        return None
    fields = []
    for name, hint in hints(info.type).items():
        default = getattr(info.default, name)
        if is_section(hint):
            fields.append(StructFieldSpec(name=name, type=hint, default=default))
            continue
        # tyro only collects the words of a flag; `with_flags` reads their value as in a file.
        spec = PrimitiveConstructorSpec[Any](
            nargs="*",
            metavar=f"{type_text(hint)} {bounds_of(info.type).get(name, '')}".rstrip(),
            instance_from_str=_Words,
            is_instance=lambda value: True,
            str_from_instance=lambda value: [as_flow(value)],
        )
        flag = StructFieldSpec(
            name=name,
            type=Annotated[hint, spec, tyro.conf.FlagConversionOff],
            default=default,
            helptext=partial(_doc, info.type, name),  # only read for the help
        )
        fields.append(flag)
    return StructConstructorSpec(instantiate=info.type, fields=tuple(fields))


@cache
def _docs(cls: type) -> dict[str, str]:
    """Return {field: the docstring below it} of a section."""
    params = docstring_parser.parse_from_object(cls).params
    return {param.arg_name: " ".join((param.description or "").split()) for param in params}


def _doc(cls: type, name: str) -> str:
    return _docs(cls)[name]


def _show_help(cfg: Config, words: list[str], *, prog: str, own: type | None) -> None:
    """Print the help of the whole config, or of the section that the first word names, and exit.

    Raises: Refusal for a section that does not exist; SystemExit(0).
    """
    asked = words[0].lstrip("-").replace("-", "_") if words else ""
    if asked not in sections():
        raise Refusal(f"--help {asked}: no such section{nearest_field(asked)}")
    shown: Any = attrgetter(asked)(cfg) if asked else cfg
    fields: list[Any] = [
        ("config", Annotated[type(shown), tyro.conf.arg(name=asked)], field(default=shown))
    ]
    if own and not asked:
        fields.insert(0, ("own", Annotated[own, tyro.conf.arg(name="")], field(default=own())))
    tyro.cli(
        make_dataclass("Settings", fields),
        prog=prog,
        description=_ABOUT,
        args=["--help"],
        registry=REGISTRY,
    )


def with_flags(cfg: Config, argv: list[str]) -> Config:
    """Return a config with the fields that flags name: `--batch.group-size 4`.

    A value is read as in a file, except that text needs no quotes. A list is several words. A flag
    that is true or false needs no value: `--data.shuffle`, `--data.no-shuffle`.

    Raises: Refusal listing every problem.
    """
    args = [_positive(word) for word in argv]
    found, others = tyro.cli(
        Config, args=args, default=cfg, return_unknown_args=True, add_help=False, registry=REGISTRY
    )
    problems = [*_repeated(args), *_no_flags(others)]
    values = flatten(found)
    for name, words in values.items():
        if isinstance(words, _Words):
            with noted(problems, f"--{name}"):
                values[name] = _value(words, settings()[name])
    if problems:
        raise Refusal(problem_list("flags", problems))
    return build(values)


def _positive(word: str) -> str:
    """Return `--data.no-shuffle` as `--data.shuffle=false`; other words stay."""
    positive = re.sub(r"^--((?:\w+\.)*)no[-_]", r"--\1", word)
    hint = settings().get(_field(positive))
    return f"{positive}=false" if positive != word and bool in kinds(hint) else word


def _field(flag: str) -> str:
    """Return the field that a flag names, perhaps with its value."""
    return flag.lstrip("-").partition("=")[0].replace("-", "_")


def _repeated(argv: list[str]) -> Iterator[str]:
    """Yield flags that are there twice: tyro silently takes the last one."""
    counts = Counter(_field(word) for word in argv if word.startswith("--"))
    for name, count in counts.items():
        if count > 1 and name in settings():
            yield f"--{name}: stands here {count} times; leave all but one out"


def _no_flags(words: list[str]) -> Iterator[str]:
    """Yield what is wrong with words that are no flags. The values of an unknown flag follow it."""
    follows_flag = False
    for word in words:
        name, equals, _ = word.partition("=")
        if word.startswith("--") and word != "--":
            follows_flag = True
            yield f"--{_field(word)}: {_unknown_flag(_field(word))}"
        elif spelling := _other_spelling(word):
            follows_flag = True
            yield spelling
        elif follows_flag:
            continue
        elif equals and re.fullmatch(r"\w+(\.\w+)*", name):
            yield f"{word}: {_NOT_NAME_VALUE}; {name}: {unknown_key(name)}"
        elif word.endswith((".yaml", ".yml")):
            yield f"{word}: expected a flag, --config {word}"
        elif word.startswith("-"):
            yield f"{word}: no flag; write a value that begins with a hyphen after =: --FLAG={word}"
        else:
            yield f"{word}: expected a flag, --SECTION.FIELD VALUE"


def _unknown_flag(name: str) -> str:
    if name in sections():
        return f"is a section, whose fields are flags: {' '.join(fields_of(name, start='--'))}"
    return unknown_key(name)


_NOT_NAME_VALUE = "flags are not written NAME=VALUE here but --NAME VALUE"
_DASHES = "-\u2010\u2011\u2012\u2013\u2014\u2015\u2212"
"""The hyphen, and what word processors and web pages write for it."""


def _other_spelling(word: str) -> str:
    """Return what is wrong with a flag of ours in another spelling, `-steps` or `steps=3`; empty
    for any other word."""
    name, equals, value = word.lstrip(f"{_DASHES}+").partition("=")
    flag = f"--{name.replace('_', '-')} {value}".rstrip()
    if name.replace("-", "_") not in (*settings(), "config"):
        return ""
    if word[0] in _DASHES:
        dash = f"{unicodedata.name(word[0]).lower()} (U+{ord(word[0]):04X})"
        return f"{word}: begins with one {dash}; flags begin with two plain hyphens: {flag}"
    return f"{word}: {_NOT_NAME_VALUE}: {flag}" if equals else ""


def _value(words: list[str], hint: Any) -> Any:
    """Return the value of a field by the words after its flag. Raises: Refusal."""
    for word in words[1:]:
        if spelling := _other_spelling(word):
            raise Refusal(spelling)
    return convert(_plain(words, hint), hint)


def _plain(words: list[str], hint: Any) -> Any:
    """Return words of the command line as YAML would have the value."""
    if bool in kinds(hint) and not words:
        return True
    of_list = next((kind for kind in kinds(hint) if typing.get_origin(kind) is tuple), None)
    if of_list and len(words) == 1 and words[0].startswith("[") and words[0].endswith("]"):
        return plain_data(words[0])
    # Where a text is allowed too, one word is that text.
    if of_list and (len(words) != 1 or str not in kinds(hint)):
        return [w if typing.get_args(of_list)[0] is str else plain_data(w) for w in words]
    if len(words) != 1:
        flags = [f"--{word.replace('_', '-')}" for word in words[1:] if word in settings()]
        meant = f"; flags begin with two hyphens: {', '.join(flags)}" if flags else ""
        raise Refusal(f"expected one value, got {' '.join(words)[:160] or 'none'}{meant}")
    is_text = str in kinds(hint) or typing.get_origin(hint) is Literal
    return words[0] if is_text else plain_data(words[0])
