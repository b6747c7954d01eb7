"""Reading configs, scripts and command lines of other frameworks."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Mapping
from functools import reduce
from pathlib import Path
from typing import Any

from spmdrl.config.yaml_text import plain_data
from spmdrl.errors import Refusal
from spmdrl.imports import refusing
from spmdrl.run_files import CONFIG, read_bytes
from spmdrl.tools.import_config.shell_text import commands
from spmdrl.tools.import_config.table import SettingsTable, table_of
from spmdrl.tools.import_config.translation import ShellValue

FRAMEWORKS = ("verl", "trl", "nemo_rl")
_LAUNCH = re.compile(r"(?:^|\s)--num[-_]processes[ =](\d+)")
_DEEPEST = 8
_OWN = {"verl": ("ppo_trainer", "ppo_megatron_trainer"), "nemo_rl": ("grpo_math_1B",), "trl": ()}
"""Configs of theirs that the defaults in the tables are those of."""
_TRAINS = {
    "verl": r"main_(?!generation|eval)\w+",
    "nemo_rl": r"run_\w*grpo\w*",
    "trl": r"grpo|gspo|--[a-z]",
}
"""Words of a command that trains."""


def read_source(path: Path | None, arguments: str, *, framework: str) -> tuple[str, dict[str, Any]]:
    """Return (framework, {dotted name: value}) of a file and of what follows it on a command line.

    Args:
        path: YAML, shell script, or Python with a call of GRPOConfig; None for arguments alone.
        arguments: a command, or hydra's overrides, which override the file.
        framework: `auto` to tell it from the text.
    Raises: Refusal if the file cannot be read or its framework is not known.
    """
    text = ""
    if path is not None:
        with refusing(f"{path} cannot be read", OSError, UnicodeDecodeError):
            text = read_bytes(path, CONFIG).decode()
    if framework == "auto":
        framework = _framework(f"{text}\n{arguments}", path)
    values: dict[str, Any] = {}
    if path is not None and path.suffix in (".yaml", ".yml"):
        tree = _with_defaults(path, text, framework=framework, depth=0)
        _refuse_others(tree, path, framework)
        values = _leaves(tree)
    elif path is not None and path.suffix == ".py":
        values = _of_python(path, text)
    elif text:
        values = _of_script(text, framework, what=str(path))
    if arguments:
        values |= _of_script(arguments, framework, what="--arguments", base=path)
    return framework, _interpolated(values, table_of(framework))


def _framework(text: str, path: Path | None) -> str:
    marks = {
        "verl": r"\bverl\b|actor_rollout_ref|adv_estimator=|hybrid_engine",
        "nemo_rl": r"nemo_rl|^loss_fn:|^policy:|grpo_math|run_grpo",
        "trl": r"\btrl\b|GRPOConfig|per_device_train_batch_size|num_generations|accelerate launch"
        r"|model_name_or_path",
    }
    for name, mark in marks.items():
        if re.search(mark, text, re.M):
            return name
    raise Refusal(
        f"{path or '--arguments'}: it looks like none of {', '.join(FRAMEWORKS)}; say which by "
        "--framework"
    )


# ------------------------------------------------------------------------- scripts


def _of_script(text: str, framework: str, *, what: str, base: Path | None = None) -> dict[str, Any]:
    """Return the settings of the last command that trains.

    Args:
        what: where the text is from, for messages.
        base: the YAML file that these settings override; None without one.
    """
    if framework != "trl" and re.fullmatch(r"(?:\s*\S+=\S+)+\s*", text):
        text = f"python {'main_ppo' if framework == 'verl' else 'run_grpo.py'} {text}"
    flags = _hydra if framework != "trl" else _dashes
    found = [
        words
        for words in commands(text)
        if any(re.search(_TRAINS[framework], word) for word in words)
        and words[0] not in ("echo", "pip")
    ]
    values = flags(found[-1]) if found else {}
    if not values:
        raise Refusal(
            f"{what}: no command that trains by reinforcement is found in it; give the command "
            "itself as --arguments"
        )
    begin = Path(str(values.get("config_name", ""))).stem
    if begin and begin not in _OWN[framework]:
        if base is None or base.stem != begin:
            raise Refusal(
                f"{what}: the command begins with config {begin}, which is not in it; give both: "
                f'import_config {begin}.yaml --arguments "$(cat SCRIPT)"'
            )
        del values["config_name"]
    if framework == "trl" and (processes := _LAUNCH.search(" ".join(found[-1]))):
        values["num_processes"] = int(processes[1])
    return values


def _hydra(words: list[str]) -> dict[str, Any]:
    """Return hydra's overrides `key=value`, `+key=value` and `~key`, which removes it, among the
    words of a command, and its config, `--config-name` or `--config`."""
    values = {}
    for word, following in zip(words, [*words[1:], ""]):
        if match := re.fullmatch(r"\+{0,2}([A-Za-z_][\w.\-]*)=(.*)", word, re.S):
            values[match[1]] = _value(match[2])
        elif match := re.fullmatch(r"~([A-Za-z_][\w.\-]*)(=.*)?", word, re.S):
            values[match[1]] = None
        elif match := re.fullmatch(r"--config(?:-name)?(?:=(.*))?", word):
            values["config_name"] = match[1] or following
    return values


def _dashes(words: list[str]) -> dict[str, Any]:
    """Return the flags `--name value ...` among the words of a command, after its script."""
    names = [i for i, word in enumerate(words) if word.startswith("--")]
    values = {}
    for i, at in enumerate(names):
        name, is_joined, own = words[at].removeprefix("--").partition("=")
        until = names[i + 1] if i + 1 < len(names) else len(words)
        parts = [own] if is_joined else [word.strip(",") for word in words[at + 1 : until]]
        script = next((j for j, part in enumerate(parts) if part.endswith(".py")), len(parts))
        parsed = [_value(part) for part in parts[:script]]  # else a flag of the launcher
        key = "config_name" if name == "config" else name.replace("-", "_")
        values[key] = parsed or True
        if len(parsed) == 1:
            values[key] = parsed[0]
    return values


def _value(text: str) -> Any:
    """Return the value of a word, in YAML's and hydra's common notation."""
    if "$" in text.replace("${", "") or re.search(r"\$\{\w+[}:]", text):
        return ShellValue(text)
    try:
        value = plain_data(text) if text else ""
    except Refusal:
        return text  # a word that is no YAML, such as a regular expression
    return None if value == "None" else _number(value)


def _number(value: Any) -> Any:
    """Return a text such as 1e-6, which YAML 1.1 does not read as a number, as one."""
    is_number = isinstance(value, str) and re.fullmatch(r"[+-]?\d+(\.\d*)?[eE][+-]?\d+", value)
    return float(value) if is_number else value


# ---------------------------------------------------------------------------- YAML


def _with_defaults(path: Path, text: str, *, framework: str, depth: int) -> dict[str, Any]:
    """Return a YAML file merged over the files that its `defaults` names."""
    if depth > _DEEPEST:
        raise Refusal(f"{path}: `defaults` lead from file to file more than {_DEEPEST} times")
    tree = plain_data(text, file=str(path))
    if not isinstance(tree, dict):
        raise Refusal(f"{path}: a mapping of settings is expected")
    named = tree.pop("defaults", [])
    merged: dict[str, Any] = {}
    for name in named if isinstance(named, list) else [named]:
        # verl's parts, such as actor@actor_rollout_ref.actor, are in its table.
        if not isinstance(name, str) or name == "_self_":
            continue
        if framework == "verl" and name in _OWN["verl"]:
            merged["config_name"] = name
            continue
        base = path.parent / (f"{name}.yaml" if framework == "verl" else name)
        with refusing(
            f"{path}: its base {name} (`defaults`) cannot be read",
            OSError,
            hint="; put it beside it, since it holds settings that this file only changes",
        ):
            own = read_bytes(base, CONFIG).decode()
        merged = _merge(merged, _with_defaults(base, own, framework=framework, depth=depth + 1))
    return _merge(merged, tree)


def _refuse_others(tree: Mapping[str, Any], path: Path, framework: str) -> None:
    """Raise a Refusal for a config of another method, whose sections the table does not have."""
    wanted = {"verl": ("actor_rollout_ref", "data"), "nemo_rl": ("grpo",)}.get(framework, ())
    if wanted and not set(wanted) & tree.keys():
        raise Refusal(
            f"{path}: no section {' or '.join(wanted)}, only {', '.join(map(str, tree))}; configs "
            "of other methods (SFT, DPO, distillation, NeMo-RL's ppo) are not translated"
        )


def _merge(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(below)
    for key, value in above.items():
        old = merged.get(key)
        merged[key] = (
            _merge(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
        )
    return merged


def _leaves(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    values: dict[str, Any] = {}
    for key, value in tree.items():
        name = f"{prefix}{key}"
        values |= (
            _leaves(value, f"{name}.")
            if isinstance(value, dict) and value
            else {name: _number(value)}
        )
    return values


def _interpolated(values: dict[str, Any], table: SettingsTable) -> dict[str, Any]:
    """Return the settings with `${other.key}`, `${.beside}`, `${oc.select:key,default}` and
    `${mul:a,b}` replaced. One that cannot be is a `ShellValue`."""
    inner = re.compile(r"\$\{([^${}]*)\}")

    def replaced(text: Any, at: str) -> Any:
        for _ in range(_DEEPEST):
            match = inner.search(text) if isinstance(text, str) else None
            if match is None:
                return text
            try:
                own = looked_up(match[1].strip(), at)
            except KeyError:
                return ShellValue(text)
            text = own if match[0] == text else text.replace(match[0], str(own))
        return ShellValue(str(text))

    def looked_up(name: str, at: str) -> Any:
        call, _, rest = name.partition(":")
        parts = [part.strip() for part in rest.split(",")]
        if call in ("oc.select", "select"):
            try:
                return looked_up(parts[0], at)
            except KeyError:
                return plain_data(parts[1]) if len(parts) > 1 else None
        if call in ("mul", "div", "sum", "add") and all(re.fullmatch(r"\d+", p) for p in parts):
            of = {"mul": operator.mul, "div": operator.floordiv}.get(call, operator.add)
            return reduce(of, map(int, parts))
        if name.startswith("."):
            levels = len(name) - len(name.lstrip("."))
            name = ".".join([*at.split(".")[:-levels], name.lstrip(".")])
        row = table.row_of(name)
        if name not in values and row is not None and row.key == name:
            return row.default
        return values[name]

    return {key: replaced(value, key) for key, value in values.items()}


# -------------------------------------------------------------------------- Python


def _of_python(path: Path, text: str) -> dict[str, Any]:
    """Return the literal arguments of the last call of GRPOConfig, or the command in the module's
    docstring, as TRL's example scripts have it; the file is not run."""
    with refusing(f"{path} is no Python", SyntaxError):
        tree = ast.parse(text)
    calls = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("GRPOConfig")
    ]
    if not calls:
        return _of_script(ast.get_docstring(tree) or "", "trl", what=f"docstring of {path}")
    values: dict[str, Any] = {}
    for keyword in calls[-1].keywords:
        if keyword.arg:
            try:
                values[keyword.arg] = ast.literal_eval(keyword.value)
            except ValueError:
                values[keyword.arg] = ShellValue(ast.unparse(keyword.value))
    return values
