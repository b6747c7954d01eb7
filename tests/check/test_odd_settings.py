"""Configs and flags that nobody should write: each is taken, or refused with a reason, at once."""

from __future__ import annotations

import random
import time
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from spmdrl import config
from spmdrl.check.dry_run import mesh_map
from spmdrl.check.settings import parse, validate
from spmdrl.config.tree import bounds, flatten, kinds, sections, settings
from spmdrl.errors import Refusal
from spmdrl.imports import is_missing_folder
from spmdrl.report.config_sizes import config_sizes
from tests.helpers import odd
from tests.helpers.built import made

SOME_S = 5.0
"""CPU seconds that a refusal may take."""


def counts(some: int, many: int) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("count", [some, pytest.param(many, marks=pytest.mark.odd)])


def says(work: Callable[[], object], *, of: object) -> str:
    """Return what is said when it is refused; empty where nothing is refused.

    Only this project's own refusals count: a ValueError of a library's explains nothing.
    """
    began, text = time.process_time(), ""
    try:
        work()
    except SystemExit as error:
        text = f"exit {error.code}"
    except Refusal as error:
        text = str(error)
        assert text, f"{of!r:.2000}"
    except Exception as error:
        raise AssertionError(f"{of!r:.2000}: {error!r}") from error
    spent = time.process_time() - began
    assert spent < SOME_S, f"{of!r:.2000}: {spent:.1f} s"
    return text


def use(cfg: config.Config) -> None:
    """Do what a dry run does with a config that is right so far."""
    if not validate(cfg):
        config_sizes(cfg)
        mesh_map(cfg)
    assert config.dump(cfg)


# --------------------------------------------------------------------------- configs


def value_of(draw: random.Random, hint: Any) -> Any:
    """Draw a value of a field's own type, in its range or not."""
    hint = draw.choice(kinds(hint))
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Literal:
        return draw.choice(args)
    if origin is tuple:
        return [value_of(draw, args[0]) for _ in range(draw.randrange(4))]
    if origin is dict:
        return {odd.text(draw): odd.value(draw, 3) for _ in range(draw.randrange(3))}
    numbers = [n for n in odd.NUMBERS if isinstance(n, hint)] if hint in (int, float) else []
    if hint is bool or not numbers:
        return draw.random() < 0.5 if hint is bool else odd.text(draw)
    return draw.choice(numbers) if draw.random() < 0.7 else hint(draw.randrange(1, 65))


def tree_of(draw: random.Random) -> Any:
    """Draw the mappings of a config: a good one, with some odd values."""
    if draw.random() < 0.02:
        return odd.value(draw)
    tree: dict[Any, Any] = {"model": {"path": "m"}, "data": {"train": "task:addition", "size": 9}}
    for _ in range(draw.randrange(1, 6)):
        section, _, name = draw.choice(list(settings())).rpartition(".")
        inner: Any = tree
        for part in filter(None, section.split(".")):
            inner = inner.setdefault(part, {}) if isinstance(inner, dict) else {}
        own = f"{section}.{name}".lstrip(".")
        is_own = draw.random() < 0.75
        inner[name] = value_of(draw, settings()[own]) if is_own else odd.value(draw)
        if draw.random() < 0.05:
            inner[odd.key(draw)] = odd.value(draw)
    if draw.random() < 0.03:
        tree[draw.choice(list(sections()))] = odd.value(draw)
    return tree


def damaged(draw: random.Random, text: str) -> str:
    """Return a text with something put in, left out or doubled."""
    for _ in range(draw.randrange(1, 4)):
        at = draw.randrange(len(text) + 1)
        put = draw.choice(
            (odd.text(draw), text[at : at + 20], "[" * 50, "&a *a", "\t", "!!set ", ": ")
        )
        text = text[:at] + put + text[at + draw.choice((0, 0, 1, 9)) :]
    return text


@counts(400, 10_000)
def test_random_configs_are_taken_or_refused_with_a_reason(count, tmp_path):
    draw, path = random.Random(1), tmp_path / "c.yaml"
    taken = 0
    for _ in range(count):
        tree = tree_of(draw)
        text = yaml.dump(tree, allow_unicode=True)
        if draw.random() < 0.2:
            text = damaged(draw, text)
        path.write_bytes(text.encode(errors="surrogatepass"))
        taken += not says(lambda: use(config.load_yaml(path)), of=text)
        if isinstance(tree, dict):
            says(lambda: use(config.from_tree(tree)), of=tree)
    assert taken > count // 20  # else nothing but the reading was tried


def argv_of(draw: random.Random, path: Path) -> list[str]:
    """Draw the words of a command line."""
    argv = ["--config", str(path)] if draw.random() < 0.8 else []
    for _ in range(draw.randrange(1, 5)):
        name = draw.choice([*settings(), *sections(), "config", "help", odd.text(draw)])
        name = name.replace("_", "-") if draw.random() < 0.5 else name
        value = odd.value(draw, 3) if draw.random() < 0.5 else odd.text(draw)
        if name in settings() and draw.random() < 0.5:
            value = value_of(draw, settings()[name])
        words = [str(v) for v in (value if isinstance(value, list) else [value])]
        if draw.random() < 0.2:
            argv.append(f"--{name}={words[0] if words else ''}")
        else:
            argv += [f"--{name}", *words][: draw.choice((1, 2, 9))]
    return argv


@counts(100, 2_000)
def test_random_flags_are_taken_or_refused_with_a_reason(count, tmp_path, capsys):
    draw, path = random.Random(2), tmp_path / "c.yaml"
    path.write_text("model: {path: m}\ndata: {train: 'task:addition', size: 9}\n")
    taken = 0
    for _ in range(count):
        argv = argv_of(draw, path)
        said = says(lambda: use(parse(argv)), of=argv)
        streams = capsys.readouterr()
        assert said != "exit 2" or (streams.err and "Traceback" not in streams.err), argv
        assert said in ("", "exit 0", "exit 2"), argv
        taken += not said
    assert taken


# --------------------------------------------------------------------------- ranges


def test_every_number_has_a_range():
    numbers = {
        name
        for name, hint in settings().items()
        for kind in kinds(hint)
        if {kind, *typing.get_args(kind)} & {int, float} and typing.get_origin(kind) is not dict
    }
    assert numbers <= bounds().keys()


OUT_OF_RANGE = [float("nan"), float("inf"), -1e18, 1e18, -(10**18), 10**18, -1, 10**9 + 1]


def test_numbers_out_of_range_are_refused_by_name():
    flat = flatten(made(model={"path": "m"}, data={"train": "task:addition", "size": 9}))
    for name in bounds():
        own = flat[name]
        for number in OUT_OF_RANGE:
            if isinstance(own, (str, tuple)) or isinstance(number, float) > isinstance(own, float):
                continue
            tree = yaml.safe_load(config.dump(config.Config()))
            inner = tree
            for part in name.split(".")[:-1]:
                inner = inner[part]
            inner[name.rpartition(".")[2]] = number
            tree["model"]["path"], tree["data"]["train"] = "m", "task:addition"
            problem = bounds()[name].problem(type(own)(number))
            found = validate(config.from_tree(tree))
            assert (f"{name}: {problem}" in found) == bool(problem), (name, number, found)


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -(10**18), 10**18])
def test_no_number_that_is_nonsense_anywhere_is_in_a_range(number):
    free = {"rewards.shaping.clamp_low", "rewards.shaping.clamp_high"}
    allowed = {n for n, b in bounds().items() if n not in free and str(b)}
    assert [n for n in allowed if not bounds()[n].problem(number)] == []


# --------------------------------------------------------------------------- YAML


@pytest.mark.parametrize(
    "text, said",
    [
        ("steps: 3\nlag: [1", "line 3, column 1: while parsing a flow sequence"),
        ("steps: 3\nsteps: 4", "line 2, column 1: the key 'steps' is here twice"),
        ("batch: {group_size: 3}\nbatch.group_size: 4", "batch.group_size: is there twice"),
        ("steps: 3\nseed: " + "9" * 5000, "line 2, column 7: '99999"),
        ("seed: 0x" + "f" * 60, "line 1, column 7: a whole number of more than 64 bits"),
        ("output_dir: 2020-13-45", "line 1, column 13: '2020-13-45' is no timestamp"),
        ("output_dir: 2020-01-01", "2020-01-01, which YAML reads as a date: put it in quotes"),
        ("a: &a [*a]", "an alias names the value that it is in, which has no end"),
        (
            "lag: " + "[" * 90 + "]" * 90,
            "line 1, column 37: lists and mappings are nested more than 32",
        ),
        ("[" * 100_000, "lists and mappings are nested more than 32 deep"),
        ("a: &a [1, 1]\nb: &b [*a, *a]\n", "unknown key"),
        ("seed: \x01", "line 1: control characters are not allowed, '\\x01'"),
        ("algorithm: {loss_options: {1: 2}}", "names are texts, and 1 is none"),
        ("algorithm: {loss_options: {a: .nan}}", "{a: ...}: expected a number, got nan"),
        ("engine: {options: {a: [2020-01-01]}}", "which YAML reads as a date"),
        ('output_dir: "a\\0b"', "holds a NUL, '\\x00', at 2; take it out"),
    ],
)
def test_what_yaml_holds_beyond_a_config_is_refused_with_its_place(text, said, tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text(text)
    found = says(lambda: config.load_yaml(path), of=text)
    assert str(path) in found and said in found


def test_a_bomb_of_aliases_is_refused(tmp_path):
    lines = ["a0: &a0 [1, 1, 1]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 12)]
    path = tmp_path / "c.yaml"
    path.write_text("\n".join(lines))
    assert "more than 100000 values" in says(lambda: config.load_yaml(path), of="bomb")


def test_files_that_are_no_text_are_refused_with_a_line(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_bytes(b"steps: 3\nseed: \xff\n")
    assert "line 2: not UTF-8" in says(lambda: config.load_yaml(path), of="bytes")
    assert "is a folder" in says(lambda: config.load_yaml(tmp_path), of="folder")
    assert "characters" in says(lambda: config.load_yaml("x" * 300), of="long name")


@pytest.mark.parametrize(
    "path, said",
    [
        ("~nobody-of-that-name/x", "there is no user 'nobody-of-that-name' on this machine"),
        ("x" * 300, "has a name of 300 characters"),
        ("d/" * 3000, "is a path of 6000 characters"),
    ],
)
@pytest.mark.parametrize("field", ["output_dir", "model.path", "data.train", "checkpoint.resume"])
def test_paths_that_no_file_system_holds_are_refused(field, path, said):
    (problem,) = validate(config.from_tree({field: path}))
    assert problem.startswith(field) and said in problem


@pytest.mark.parametrize(
    ("path", "is_missing"), [("x" * 300, False), ("./" + "x" * 300, True), ("~nobody/x", True)]
)
def test_names_that_no_disk_can_hold_are_asked_for_without_an_error(path, is_missing):
    assert is_missing_folder(path) == is_missing


SECRET = "hunter2"


@pytest.mark.parametrize(
    "address",
    [
        f"http://me:{SECRET}@host:5000",
        f"https://{SECRET}@host",
        f"http://me:a/{SECRET}@host",
        f"http://me:a?#{SECRET}@host/x",
        f"http://me:[{SECRET}@host",
        f"HTTP://me:{SECRET}@host",
        f"me:{SECRET}@host:5000",
        f"postgresql://me:{SECRET}@host/runs",
        f"mysql+pymysql://me:{SECRET}@host/runs",
        f"postgresql://host/runs?user=me&password={SECRET}",
        f"http://host:5000/?access_token={SECRET}",
        f"sqlite:///x.db?key={SECRET}",
    ],
)
@pytest.mark.parametrize("dry_run", ["", "full"])
def test_a_secret_in_the_trackers_address_is_refused_and_shown_nowhere(
    address, dry_run, capsys, tmp_path
):
    own = [f"--report.mlflow.uri={address}", f"--output-dir={tmp_path / 'out'}"]
    with pytest.raises(SystemExit):
        parse([*own, *(["--dry-run", dry_run] if dry_run else [])])
    said = "".join(capsys.readouterr())
    assert "report.mlflow.uri: holds a user's name, a password or a token" in said
    assert "MLFLOW_TRACKING_PASSWORD" in said and SECRET not in said
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "address",
    [
        "",
        "http://host:5000",
        "https://host/mlflow?workspace=3",
        "sqlite:////shared/a@b/mlflow.db",
        "/shared/a@b/mlruns",
        "file:///shared/me:x@y",
        "postgresql://me@host/runs",
        "databricks://profile",
    ],
)
def test_an_address_without_a_secret_is_none(address):
    assert bounds()["report.mlflow.uri"].problem(address) == ""
