"""Which statements of spmdrl only CUDA reaches, and which tests execute each without a GPU.

    python -m tests.gpu.cuda_lines              # the count
    python -m tests.gpu.cuda_lines --missing    # and the statements that only `make gpu` executes

It runs the tests that cuda_lines.md names, and records what they execute of these statements.
"""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "spmdrl"
RECORD = "SPMDRL_CUDA_LINES"
"""Environment variable: the file to which processes append what they execute."""
ON_META = "tests/gpu/test_on_meta.py"

BY_NATURE = {
    "engine/vllm/engine.py:VllmEngine.sleep": "vLLM has no sleep mode on the CPU",
    "engine/vllm/engine.py:VllmEngine.wake": "vLLM has no sleep mode on the CPU",
    "engine/vllm/internals.py:unregistered_tensors": "called by sleep",
    "engine/vllm/internals.py:_attributes": "called by unregistered_tensors",
    "model/attention/kernels.py:_varlen": "kernel of CUDA",
    "model/attention/kernels.py:_flash": "kernel of CUDA",
    "model/attention/kernels.py:_bounds": "called by these",
    "model/attention/sinks.py:FlashWithSinks.forward": "kernel of CUDA",
    "model/attention/sinks.py:FlashWithSinks.backward": "kernel of CUDA",
    "model/parallel/ring_attention.py:flash_forward": "kernel of CUDA",
    "model/parallel/ring_attention.py:flash_backward": "kernel of CUDA",
    "world/torch_internals.py:varlen": "kernel of CUDA",
    "world/torch_internals.py:pin_exactly": "called where optimizer state is offloaded",
    "model/transformers_internals.py:zero_idle_experts": "called on Blackwell",
}
"""{function that no condition marks: why only CUDA reaches it}."""

_ASKS = ("device_count", "is_available", "is_initialized")
"""Functions of torch.cuda that work without CUDA."""
_WORDS = re.compile(r"cuda|nccl|cpu|pin_memory")
_NO = {"cuda": "cpu", "cpu": "cuda", "": ""}


# --------------------------------------------------------------------------- what only CUDA reaches


@dataclass(frozen=True)
class Place:
    """A statement, or a part of one, that only CUDA reaches."""

    file: str  # in spmdrl
    function: str
    start: tuple[int, int]  # line, column
    end: tuple[int, int]

    @property
    def text(self) -> str:
        """Return the first line of it."""
        return _lines(self.file)[self.start[0] - 1][self.start[1] :].strip()

    def holds(self, start: tuple[int, int], end: tuple[int, int]) -> bool:
        """Return whether an instruction of these lines and columns belongs to it."""
        return self.start <= start and end <= self.end


@cache
def _lines(file: str) -> list[str]:
    return (SOURCE / file).read_text().splitlines()


class _Meaning(NamedTuple):
    """The device, cuda or cpu, that a condition tells when it holds, and when not; else empty."""

    held: str = ""
    failed: str = ""


class _Finder:
    """Finds the places of one file."""

    def __init__(self, file: str):
        self.file = file
        self.places: list[Place] = []
        self._tree = ast.parse((SOURCE / file).read_text())
        self._private: dict[str, ast.AST] = {}  # private functions and classes of the module
        self._known: dict[str, _Meaning] = {}  # local names of the function
        self._of_self: dict[str, _Meaning] = {}  # attributes, as `self.name`
        self._only: set[str] = set()  # names of BY_NATURE, and those called only from places

    def run(self) -> list[Place]:
        """Return the places, in order."""
        for node in self._tree.body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name.startswith("_"):
                self._private[node.name] = node
        while True:
            self.places = []
            self._visit_body(self._tree.body, "", is_only=False)
            found = {name for name, node in self._private.items() if self._is_only_used(name, node)}
            if found <= self._only:
                return sorted(set(self.places), key=lambda p: (p.start, p.end))
            self._only |= found

    def _is_only_used(self, name: str, own: ast.AST) -> bool:
        """Return whether a private name is used, and only in places."""
        uses = [
            ((node.lineno, node.col_offset), (node.end_lineno, node.end_col_offset))
            for node in ast.walk(self._tree)
            if isinstance(node, ast.Name)
            and node.id == name
            and not own.lineno <= node.lineno <= own.end_lineno
        ]
        return bool(uses) and all(any(p.holds(*use) for p in self.places) for use in uses)

    # ---------------------------------------------------------------- statements

    def _visit_body(self, body: list[ast.stmt], function: str, *, is_only: bool) -> None:
        """Visit a block. `is_only`: only CUDA reaches it."""
        for statement in body:
            is_only = self._visit(statement, function, is_only=is_only) or is_only

    def _visit(self, node: ast.stmt, function: str, *, is_only: bool) -> bool:
        """Visit a statement; return whether only CUDA goes on after it."""
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            name = f"{function}.{node.name}".lstrip(".")
            own = is_only or node.name in self._only or f"{self.file}:{name}" in BY_NATURE
            before, self._known = self._known, {}
            self._visit_body(node.body, name, is_only=own)
            self._known = before
            return False
        if isinstance(node, ast.If):
            return self._visit_if(node, function, is_only=is_only)
        if isinstance(node, ast.With | ast.For | ast.While | ast.Try):
            return self._visit_compound(node, function, is_only=is_only)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            return False  # a docstring
        if isinstance(node, ast.Import | ast.ImportFrom | ast.Pass):
            return False
        if is_only:
            self._add(node, function)
            return False
        if isinstance(node, ast.Assign):
            own = self._known if isinstance(node.targets[0], ast.Name) else self._of_self
            own[ast.unparse(node.targets[0])] = self._meaning(node.value)
        if function and self._calls_cuda(node):
            self._add(node, function)
            return not isinstance(node, ast.Return)
        self._visit_parts(node, function)
        return False

    def _visit_if(self, node: ast.If, function: str, *, is_only: bool) -> bool:
        meaning = self._meaning(node.test)
        asks = self._calls_cuda(node.test)
        is_only = is_only or asks
        if is_only:
            self._add(node.test, function)
        else:
            self._visit_parts(node.test, function)
        self._visit_body(node.body, function, is_only=is_only or meaning.held == "cuda")
        self._visit_body(node.orelse, function, is_only=is_only or meaning.failed == "cuda")
        return asks or (not node.orelse and meaning.failed == "cuda" and _ends(node.body))

    def _visit_compound(self, node: Any, function: str, *, is_only: bool) -> bool:
        for name in ("items", "iter", "test"):
            parts = getattr(node, name, [])
            for part in parts if isinstance(parts, list) else [parts]:
                part = part.context_expr if isinstance(part, ast.withitem) else part
                if is_only:
                    self._add(part, function)
                else:
                    self._visit_parts(part, function)
        goes_on = False
        for name in ("body", "orelse", "finalbody"):
            for statement in getattr(node, name, []):
                found = self._visit(statement, function, is_only=is_only or goes_on)
                goes_on = goes_on or (found and not isinstance(node, ast.For | ast.While))
        for handler in getattr(node, "handlers", []):
            self._visit_body(handler.body, function, is_only=is_only or goes_on)
        return goes_on

    # ---------------------------------------------------------------- expressions

    def _visit_parts(self, node: ast.AST, function: str) -> None:
        """Add the branches of conditional expressions that only CUDA reaches."""
        if isinstance(node, ast.IfExp):
            meaning = self._meaning(node.test)
            for part, device in ((node.body, meaning.held), (node.orelse, meaning.failed)):
                if device == "cuda" or self._calls_cuda(part):
                    self._add(part, function)
        if isinstance(node, ast.ListComp | ast.GeneratorExp) and self._calls_cuda(node.elt):
            self._add(node.elt, function)
        if isinstance(node, ast.BoolOp):
            is_and = isinstance(node.op, ast.And)
            is_only = False
            for part in node.values:
                if is_only:
                    self._add(part, function)
                meaning = self._meaning(part)
                is_only = is_only or (meaning.held if is_and else meaning.failed) == "cuda"
        for child in ast.iter_child_nodes(node):
            self._visit_parts(child, function)

    def _meaning(self, node: ast.expr) -> _Meaning:
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            inner = self._meaning(node.operand)
            return _Meaning(inner.failed, inner.held)
        if isinstance(node, ast.BoolOp):
            held = [self._meaning(part).held for part in node.values]
            failed = [self._meaning(part).failed for part in node.values]
            if isinstance(node.op, ast.And):
                return _Meaning(_any(held), _all(failed))
            return _Meaning(_all(held), _any(failed))
        if isinstance(node, ast.Compare) and len(node.ops) == 1:
            return self._compared(node)
        text = ast.unparse(node)
        known = self._known if isinstance(node, ast.Name) else self._of_self
        if text in known:
            return known[text]
        if re.fullmatch(r"on_cpu|_?is_on_cpu\(.*\)", text):
            return _Meaning("cpu", "cuda")
        if re.fullmatch(rf"([\w.]+\.)?is_cuda|torch\.cuda\.({'|'.join(_ASKS)})\(\)", text):
            return _Meaning("cuda", "cpu")
        return _Meaning()

    def _compared(self, node: ast.Compare) -> _Meaning:
        constant = node.comparators[0]
        asks = re.search(
            r"\.type$|(?<!layout\.)\bbackend$|get_backend\(\)$", ast.unparse(node.left)
        )
        is_known = isinstance(constant, ast.Constant) and constant.value in ("cuda", "nccl", "cpu")
        if not asks or not is_known or not isinstance(node.ops[0], ast.Eq | ast.NotEq):
            return _Meaning()
        device = "cpu" if constant.value == "cpu" else "cuda"
        if isinstance(node.ops[0], ast.NotEq):
            device = _NO[device]
        return _Meaning(device, _NO[device])

    def _calls_cuda(self, node: ast.AST) -> bool:
        """Return whether a statement always does what only CUDA can."""
        if isinstance(node, ast.IfExp):
            return self._calls_cuda(node.test)
        if isinstance(node, ast.BoolOp):
            return self._calls_cuda(node.values[0])
        if isinstance(node, ast.ListComp | ast.GeneratorExp):
            parts = [node.generators[0].iter, *(test for g in node.generators for test in g.ifs)]
            return any(map(self._calls_cuda, parts))
        text = ast.unparse(node) if isinstance(node, ast.Attribute | ast.keyword) else ""
        is_call = re.fullmatch(r"torch\.cuda\.(\w+)", text)
        if is_call and is_call[1] not in _ASKS:
            return True
        if text == "pin_memory=True":
            return True
        return any(map(self._calls_cuda, ast.iter_child_nodes(node)))

    def _add(self, node: Any, function: str) -> None:
        start = (node.lineno, node.col_offset)
        self.places.append(
            Place(self.file, function, start, (node.end_lineno, node.end_col_offset))
        )


def _any(devices: list[str]) -> str:
    return next(filter(None, devices), "")


def _all(devices: list[str]) -> str:
    return devices[0] if len(set(devices)) == 1 else ""


def _ends(body: list[ast.stmt]) -> bool:
    return isinstance(body[-1], ast.Return | ast.Raise | ast.Continue)


@cache
def places() -> tuple[Place, ...]:
    """Return what only CUDA reaches in all of spmdrl but its tools."""
    found: list[Place] = []
    for path in sorted(SOURCE.rglob("*.py")):
        file = str(path.relative_to(SOURCE))
        is_named = file in {name.partition(":")[0] for name in BY_NATURE}
        if not file.startswith("tools/") and (is_named or _WORDS.search(path.read_text())):
            found += _Finder(file).run()
    return tuple(found)


def functions() -> set[str]:
    """Return FILE:FUNCTION of all that have such places."""
    return {f"{place.file}:{place.function}" for place in places() if place.function}


def table() -> dict[str, list[str]]:
    """Return {file:function: what reaches it} of cuda_lines.md."""
    text = Path(__file__).with_name("cuda_lines.md").read_text()
    rows = re.findall(r"^\| `([^`]+)` \| (.+) \|$", text, re.MULTILINE)
    return {name: re.findall(r"`([^`]+)`", reached) for name, reached in rows}


# --------------------------------------------------------------------------- what tests execute


def record(file: str) -> None:
    """Append to `file` what this process executes of these places, and in which test."""
    by_file: dict[str, list[Place]] = {}
    for place in places():
        by_file.setdefault(str(SOURCE / place.file), []).append(place)
    wanted: dict[CodeType, dict[int, Place]] = {}
    seen: set[tuple[Place, str]] = set()
    out = Path(file).open("a", buffering=1)  # noqa: SIM115 (until the process ends)

    def look(frame: FrameType, event: str, _: Any) -> Callable | None:
        code = frame.f_code
        if event == "call":
            if code.co_filename not in by_file:
                return None
            if code not in wanted:
                wanted[code] = _instructions(code, by_file[code.co_filename])
            if not wanted[code]:
                return None
            frame.f_trace_opcodes = True
        elif event == "opcode" and (place := wanted[code].get(frame.f_lasti)):
            test = os.environ.get("PYTEST_CURRENT_TEST", "").partition(" ")[0]
            if (place, test) not in seen:
                seen.add((place, test))
                line, column = place.start
                out.write(f"{place.file}:{line}:{column} {test}\n")
        return look

    import threading

    threading.settrace(look)
    sys.settrace(look)


def _instructions(code: CodeType, own: list[Place]) -> dict[int, Place]:
    """Return {offset of an instruction: the innermost place that it belongs to}."""
    found = {}
    for index, (line, end_line, column, end_column) in enumerate(code.co_positions()):
        if None not in (line, end_line, column, end_column):
            here = (line, column), (end_line, end_column)
            inside = [place for place in own if place.holds(*here)]
            if inside:
                found[index * 2] = max(inside, key=lambda place: place.start)
    return found


def executed() -> dict[Place, set[str]]:
    """Run the tests that the table names; return {place: the tests that execute it}."""
    files = {
        one.partition("::")[0] for reached in table().values() for one in reached if "::" in one
    }
    with tempfile.TemporaryDirectory() as folder:
        file = f"{folder}/executed"
        run = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
            + sorted(f"tests/{name}.py" for name in files),
            cwd=ROOT,
            env=os.environ | {RECORD: file},
        )
        if run.returncode:
            raise SystemExit("some of these tests failed: the count would be wrong")
        lines = Path(file).read_text().splitlines()
    by_start = {f"{p.file}:{p.start[0]}:{p.start[1]}": p for p in places()}
    found: dict[Place, set[str]] = {}
    for line in set(lines):
        place, _, test = line.partition(" ")
        found.setdefault(by_start[place], set()).add(test)
    return found


def report(found: dict[Place, set[str]], *, shows_missing: bool) -> Iterator[str]:
    """Yield the lines of the count."""
    kinds: Counter[str] = Counter()
    missing = []
    for place in places():
        tests = found.get(place, set())
        if not tests:
            missing.append(place)
            kinds["only make gpu"] += 1
        elif all(test.startswith(ON_META) for test in tests):
            kinds["on meta tensors"] += 1
        else:
            kinds["by stubs"] += 1
    total = len(places())
    yield f"{total} statements that only CUDA reaches, in {len(functions())} functions"
    for kind in ("by stubs", "on meta tensors", "only make gpu"):
        yield f"  {kind:16} {kinds[kind]:4} {kinds[kind] / total:6.1%}"
    if shows_missing:
        for place in missing:
            yield f"{place.file}:{place.start[0]} {place.function}: {place.text}"


if __name__ == "__main__":
    for line in report(executed(), shows_missing="--missing" in sys.argv[1:]):
        print(line)
