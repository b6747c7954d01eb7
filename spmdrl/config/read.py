"""Reading a config strictly, and writing it back."""

from __future__ import annotations

import dataclasses
import difflib
import signal
import sys
import types
import typing
from pathlib import Path
from typing import Any, Literal, Union

import tyro
import yaml

from spmdrl.check.settings import validate
from spmdrl.config.fields import Config, option_value
from spmdrl.rewards.signatures import reward_models


def parse(argv: list[str] | None = None) -> Config:
    """Read `--config FILE` and command-line overrides into a checked Config.

    Args:
        argv: arguments without the program name; None takes sys.argv.
    Returns: the Config, valid as far as can be told without starting anything.
    Raises: SystemExit(2) with every problem listed, one per line.
    """
    if argv is None and {"-h", "--help", "--dry-run"} & set(sys.argv):
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `... --help | head` ends without a word
    argv = list(sys.argv[1:] if argv is None else argv)
    cfg = read(argv, prog="train.py --config FILE")
    refuse(
        validate(cfg) + ([] if cfg.dry_run else _missing_models(cfg)), of=_take_config_flag(argv)[0]
    )
    return cfg


def read(argv: list[str], *, prog: str, about: str = "") -> Config:
    """Read `--config FILE` and command-line overrides; the values are not checked yet.

    Args:
        argv: arguments without the program name.
        prog, about: of the help.
    Raises: SystemExit(2) as `parse`.
    """
    path, rest = _take_config_flag(argv)
    try:
        default = load_yaml(path) if path else Config()
    except ValueError as error:
        _exit(str(error))
    return tyro.cli(
        Config,
        default=default,
        args=rest,
        prog=prog,
        description=f"{about}--config FILE\n"
        "    YAML file to start from, e.g. one of configs/. Every option below is a\n"
        "    field of it and overrides it; the defaults shown are the file's.",
    )


def refuse(problems: list[str], *, of: str) -> None:
    """Print the problems of a config, one per line, and exit with 2; return if there are none.

    Args:
        of: the config's file; empty for none.
    """
    if problems:
        _exit(_problem_list(f"config {of or '(defaults and flags)'}", problems))


def _missing_models(cfg: Config) -> list[str]:
    model = cfg.model
    named = {
        "model.path": model.path,
        "model.tokenizer": model.tokenizer,
        "model.reference": model.reference,
        "model.teacher": model.teacher,
    }
    pairs = [*named.items()]
    if cfg.objective.samples:
        pairs += [("rewards.functions", p) for p in reward_models(cfg.rewards.functions).values()]
    return [
        f"{field}: folder {path} does not exist (looked from {Path.cwd()})"
        for field, path in pairs
        if is_missing_folder(path)
    ]


def is_missing_folder(path: str) -> bool:
    """Return whether a model's name can only be a folder, and there is none.

    A hub name is `owner/name`, so `runs/mine` is a folder where `runs` is one.
    """
    if not path or Path(path).expanduser().is_dir():
        return False
    looks_local = path.startswith(("/", ".", "~")) or path.count("/") > 1 or path.endswith("/")
    return looks_local or ("/" in path and Path(path).parent.is_dir())


def _take_config_flag(argv: list[str]) -> tuple[str, list[str]]:
    path, rest, i = "", [], 0
    while i < len(argv):
        if argv[i] == "--config":
            if i + 1 == len(argv):
                _exit("--config needs a file name after it")
            path, i = argv[i + 1], i + 2
        elif argv[i].startswith("--config="):
            path, i = argv[i].split("=", 1)[1], i + 1
        else:
            rest, i = rest + [argv[i]], i + 1
    return path, rest


def _exit(message: str) -> typing.NoReturn:
    print(message, file=sys.stderr)
    raise SystemExit(2)


def _problem_list(where: str, problems: list[str]) -> str:
    lines = [f"{where}: {len(problems)} problem{'s' * (len(problems) > 1)}"]
    return "\n".join(lines + [f"  - {problem}" for problem in problems])


def load_yaml(path: str | Path) -> Config:
    """Read one YAML file strictly.

    Returns: Config with defaults where the file is silent; not yet validated.
    Raises: ValueError listing every unknown key (with the nearest known one) and every value
        of a wrong type.
    """
    path = Path(path)
    if not path.is_file():
        near = difflib.get_close_matches(path.name, [p.name for p in path.parent.glob("*.yaml")])
        hint = f"; did you mean {path.parent / near[0]}?" if near else ""
        raise ValueError(f"config file {path} does not exist{hint}")
    try:
        tree = yaml.safe_load(path.read_text()) or {}
    except yaml.YAMLError as error:
        raise ValueError(f"config file {path} is not valid YAML: {error}") from error
    problems: list[str] = []
    cfg = from_dict(Config, tree, problems=problems)
    if problems:
        raise ValueError(_problem_list(f"config file {path}", problems))
    return cfg


def from_dict(cls: type, tree: Any, *, problems: list[str], prefix: str = "") -> Any:
    """Build dataclass `cls` from a nested dict, appending to `problems` what does not fit."""
    if not isinstance(tree, dict):
        problems.append(f"{prefix or 'file'}: expected a mapping of fields, got {tree!r}")
        return cls()
    hints = typing.get_type_hints(cls)
    values = {}
    for key, value in tree.items():
        name = f"{prefix}{key}"
        if key not in hints:
            problems.append(f"{name}: unknown key{_nearest(str(key), cls)}")
        elif dataclasses.is_dataclass(hints[key]):
            values[key] = from_dict(hints[key], value, problems=problems, prefix=f"{name}.")
        else:
            try:
                values[key] = _convert(value, hints[key])
            except ValueError as error:
                problems.append(f"{name}: {error}")
    return cls(**values)


def _nearest(key: str, cls: type) -> str:
    own = [f.name for f in dataclasses.fields(cls)]
    everywhere = {name.rsplit(".", 1)[-1]: name for name in flatten(Config())}
    if key in everywhere:  # the right name in the wrong section
        return f"; did you mean {everywhere[key]}?"
    if near := difflib.get_close_matches(key, own, n=1, cutoff=0.6):
        return f"; did you mean {near[0]}?"
    if near := difflib.get_close_matches(key, list(everywhere), n=1, cutoff=0.7):
        return f"; did you mean {everywhere[near[0]]}?"
    return f"; known here: {', '.join(own)}"


def _convert(value: Any, hint: Any) -> Any:
    if hint is Any:
        return value
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        if value in args and type(value) in {type(a) for a in args}:
            return value
        near = difflib.get_close_matches(str(value), [str(a) for a in args], n=1)
        hint_text = f"; did you mean {near[0]}?" if near else ""
        raise ValueError(f"{value!r} is not one of {', '.join(map(str, args))}{hint_text}")
    if origin is tuple:
        if not isinstance(value, (list, tuple)):
            raise ValueError(f"expected a list, got {value!r}")
        if len(args) == 2 and args[1] is Ellipsis:
            return tuple(_convert(item, args[0]) for item in value)
        if len(value) != len(args):
            raise ValueError(f"expected {len(args)} values, got {value!r}")
        return tuple(_convert(item, arg) for item, arg in zip(value, args))
    if origin is dict:
        if not isinstance(value, dict):
            raise ValueError(f"expected a mapping, got {value!r}")
        return {str(k): _convert(v, args[1]) for k, v in value.items()}
    if origin in (Union, types.UnionType):
        if type(value) in args:
            return option_value(value)
        raise ValueError(f"expected a plain number, string or bool, got {value!r}")
    if hint is float and isinstance(value, (int, str)) and not isinstance(value, bool):
        try:
            return float(value)  # YAML 1.1 reads 1e-6 as a string
        except ValueError:
            raise ValueError(f"expected a number, got {value!r}") from None
    if type(value) is not hint:
        raise ValueError(f"expected {hint.__name__}, got {value!r}")
    return value


def flatten(cfg: Any, prefix: str = "") -> dict[str, Any]:
    """Return {dotted field name: value} of a config."""
    flat: dict[str, Any] = {}
    for f in dataclasses.fields(cfg):
        value = getattr(cfg, f.name)
        if dataclasses.is_dataclass(value):
            flat |= flatten(value, f"{prefix}{f.name}.")
        else:
            flat[prefix + f.name] = value
    return flat


def dump(cfg: Config) -> str:
    """Return the resolved config as YAML that `load_yaml` reads back to an equal Config."""

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {k: plain(v) for k, v in value.items()}
        return [plain(v) for v in value] if isinstance(value, (list, tuple)) else value

    return yaml.safe_dump(plain(dataclasses.asdict(cfg)), sort_keys=False)
