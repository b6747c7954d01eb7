"""No thread but the main one calls CUDA: a call during the capture of vLLM's graphs ends it.

Which functions a thread reaches is found in the source. A call of `x.name()` counts as one of every
method of that name in a module that the caller's module imports, itself or by others.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp

from spmdrl.checkpoint.save import _TensorWriter

ROOT = Path(__file__).parents[2]
IN_WORKERS = ("agents/", "sandbox/", "workers/", "rewards/", "environments/", "tools/")
"""Threads of other processes than ranks, or of no run."""

THREADS = {
    "checkpoint/save.py": {"_write"},
    "report/tracker.py": {"_run"},
    "world/folder_lock.py": {"_touch"},
    "world/leaving.py": {"_handle"},
    "world/lost_peers/watch.py": {"_run", "_watch_store"},
    "world/machine/host_memory.py": {"_run"},
    "world/sealed_store.py": {"_await_key"},
}
"""{module: the functions that threads of a rank run}."""
CALLED_BACK = {
    "checkpoint/save.py": {"write_data"},  # by DCP's thread, after it has copied to the host
    "report/report.py": {"_abandon"},  # before_exit of the watch
    "world/machine/host_memory.py": {"tell_kills"},  # likewise
}
"""What threads call that no call shows."""


@dataclass
class Module:
    """The functions of a module, and what it imports of spmdrl."""

    tree: ast.AST
    functions: dict[str, list[ast.AST]] = field(default_factory=dict)
    imports: set[str] = field(default_factory=set)
    names: dict[str, str] = field(default_factory=dict)  # {name here: module of spmdrl}


@cache
def modules() -> dict[str, Module]:
    found = {}
    for path in (ROOT / "spmdrl").rglob("*.py"):
        found[str(path.relative_to(ROOT / "spmdrl"))] = _module(ast.parse(path.read_text()))
    for module in found.values():
        module.imports = {name for name in module.imports if name in found}
    return found


def _module(tree: ast.AST) -> Module:
    module = Module(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            module.functions.setdefault(node.name, []).append(node)
        elif isinstance(node, ast.ClassDef):
            made = [n for n in node.body if getattr(n, "name", "") in ("__init__", "__post_init__")]
            module.functions.setdefault(node.name, []).extend(made)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("spmdrl"):
            file = node.module.removeprefix("spmdrl").removeprefix(".").replace(".", "/")
            for alias in node.names:
                inner = f"{file}/{alias.name}.py".lstrip("/")
                for name in (f"{file}.py", f"{file}/__init__.py", inner):
                    module.imports.add(name)
                module.names[alias.asname or alias.name] = f"{file}.py"
    return module


@cache
def imported(file: str) -> frozenset[str]:
    """Return the modules that a module imports, itself or by others, and the module itself."""
    found: set[str] = set()
    new = {file}
    while new:
        found |= new
        new = {name for one in new for name in modules()[one].imports} - found
    return frozenset(found)


def called(file: str, function: ast.AST) -> Iterator[tuple[str, str]]:
    """Yield (module, function) of what a function may call or hand on."""
    module = modules()[file]
    for node in ast.walk(function):
        if isinstance(node, ast.Name):
            yield module.names.get(node.id, file), node.id
        elif isinstance(node, ast.Attribute):
            is_own = isinstance(node.value, ast.Name) and node.value.id == "self"
            for other in [file] if is_own else imported(file):
                yield other, node.attr


def reached(file: str, name: str) -> set[tuple[str, str]]:
    """Return the functions that may run when this one does."""
    found: set[tuple[str, str]] = set()
    new = {(file, name)}
    while new:
        found |= new
        calls = {
            call
            for place, own in new
            for function in modules()[place].functions[own]
            for call in called(place, function)
        }
        new = {
            (place, own)
            for place, own in calls
            if place in modules() and own in modules()[place].functions
        } - found
    return found


def uses_cuda(place: str, name: str) -> bool:
    text = "\n".join(map(ast.unparse, modules()[place].functions[name]))
    return bool(re.search(r"torch\.cuda\.|\.cuda\(|device_bytes|pin_memory=True", text))


def started(file: str) -> set[str]:
    """Return the names of the functions that a module runs in threads."""
    found = set()
    for node in ast.walk(modules()[file].tree):
        if not isinstance(node, ast.Call):
            continue
        kind = ast.unparse(node.func)
        targets = [k.value for k in node.keywords if k.arg == "target"]
        if kind.endswith("_writer.submit"):
            targets = node.args[:1]
        elif not kind.endswith(("Thread", "Timer", "Process")):
            continue
        found |= {ast.unparse(target).rpartition(".")[2] for target in targets}
    return found


def test_every_thread_of_a_rank_is_listed():
    found = {}
    for file in modules():
        if not file.startswith(IN_WORKERS) and (names := started(file)):
            found[file] = names
    found["world/lost_peers/watch.py"].discard("run")  # a partial of this:
    found["world/lost_peers/watch.py"].add("_run")
    assert found == THREADS
    texts = {file: (ROOT / "spmdrl" / file).read_text() for file in modules()}
    callers = {file for file, text in texts.items() if "before_exit.append(" in text}
    assert callers == CALLED_BACK.keys() - {"checkpoint/save.py"}


def test_no_thread_but_the_main_one_reaches_cuda():
    seen = {}
    for file, names in (*THREADS.items(), *CALLED_BACK.items()):
        for name in names:
            places = reached(file, name)
            seen[f"{file}:{name}"] = len(places)
            cuda = sorted(f"{p}:{own}" for p, own in places if uses_cuda(p, own))
            assert not cuda, f"thread {file}:{name} may call {cuda}"
    assert min(seen.values()) >= 1 and seen["world/lost_peers/watch.py:_run"] > 20, seen


def test_a_thread_that_calls_cuda_would_be_found():
    assert any(uses_cuda(*one) for one in reached("world/world.py", "start"))
    assert any(uses_cuda(*one) for one in reached("sync/stream.py", "push"))


def test_the_thread_that_writes_tensors_calls_no_cuda(gpu, tmp_path):
    written = {"weight": torch.arange(3 * 2**20).float()}
    dcp.save(written, storage_writer=_TensorWriter(tmp_path), no_dist=True)
    assert "current_stream" not in gpu.called
    read = {"weight": torch.zeros_like(written["weight"])}
    dcp.load(read, storage_reader=dcp.FileSystemReader(tmp_path), no_dist=True)
    assert torch.equal(read["weight"], written["weight"])
