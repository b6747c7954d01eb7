"""Every function with lines that only CUDA reaches: which test executes them, or which part of
`make gpu`; the table in cuda_lines.md is complete."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from benchmarks.gpu.__main__ import PARTS
from spmdrl.checkpoint.state import rng_state, set_rng_state
from spmdrl.model.flops import device_peak_flops
from spmdrl.report.provenance import describe_environment
from spmdrl.same_run.made_of import device_name
from spmdrl.sync.negotiation import _link
from spmdrl.world.machine.live_bytes import free_bytes, peak_bytes

ROOT = Path(__file__).parents[2]

# Code that says `cuda` or `nccl`, but for asking whether there is any.
_ONLY_CUDA = re.compile(
    r"torch\.cuda\.(?!device_count|is_available)|is_cuda|[!=]= '(cuda|nccl)'|pin_memory=(?!False)"
)


def functions(node: ast.AST, name: str = "") -> Iterator[str]:
    """Yield the names of functions that have lines which only CUDA reaches."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.FunctionDef, ast.ClassDef)):
            yield from functions(child, f"{name}.{child.name}".lstrip("."))
        elif name and _ONLY_CUDA.search(_own_text(child)):
            yield name


def _own_text(statement: ast.AST) -> str:
    """Return a statement's source without its docstring."""
    is_text = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
    return "" if is_text else ast.unparse(statement)


def table() -> dict[str, list[str]]:
    """Return {file:function: what reaches it} of cuda_lines.md."""
    text = Path(__file__).with_name("cuda_lines.md").read_text()
    rows = re.findall(r"^\| `([^`]+)` \| (.+) \|$", text, re.MULTILINE)
    return {name: re.findall(r"`([^`]+)`", reached) for name, reached in rows}


def test_the_table_of_lines_that_only_cuda_reaches_is_complete():
    found = {
        f"{path.relative_to(ROOT / 'spmdrl')}:{name}"
        for path in (ROOT / "spmdrl").rglob("*.py")
        for name in functions(ast.parse(path.read_text()))
    }
    assert sorted(table()) == sorted(found)


def test_what_the_table_names_exists():
    parts = {part.name for part in PARTS}
    for function, reached in table().items():
        assert reached, f"nothing reaches {function}"
        for one in reached:
            if "::" in one:
                file, _, test = one.partition("::")
                text = (ROOT / "tests" / f"{file}.py").read_text()
                assert f"def {test}(" in text, f"{function}: no {one}"
            else:
                assert one in parts, f"{function}: no part {one} of make gpu"


@pytest.fixture
def gpu(monkeypatch) -> SimpleNamespace:
    """Let torch.cuda believe in one H100, of which it records what it is asked to do."""
    called: list[str] = []
    taken = {"now": 100, "most": 700}
    answers = {
        "is_initialized": lambda: True,
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "get_device_name": lambda device=None: "NVIDIA H100 80GB HBM3",
        "mem_get_info": lambda device=None: (300, 1000),
        "memory_allocated": lambda device=None: taken["now"],
        "max_memory_allocated": lambda device=None: taken["most"],
        "get_rng_state": lambda: torch.tensor([7], dtype=torch.uint8),
        "set_rng_state": lambda state: called.append(f"set_rng_state {state.tolist()}"),
    }
    for name in ("synchronize", "reset_peak_memory_stats", "empty_cache"):
        answers[name] = lambda device=None, name=name: called.append(name)
    for name, answer in answers.items():
        monkeypatch.setattr(torch.cuda, name, answer)
    return SimpleNamespace(device=torch.device("cuda", 0), called=called)


def test_a_certificate_names_the_gpu(gpu):
    assert device_name(gpu.device) == "NVIDIA H100 80GB HBM3"
    assert device_name(torch.device("cpu")) == "cpu"


def test_generators_of_the_gpu_are_kept_and_restored(gpu):
    state = rng_state()
    assert state["cuda"].tolist() == [7]
    set_rng_state(state)
    assert gpu.called == ["set_rng_state [7]"]


def test_memory_is_asked_of_the_device_when_it_is_done(gpu):
    with peak_bytes(gpu.device) as peak:
        gpu.called.append("work")
    assert peak.bytes == 700 - 100
    assert gpu.called == ["synchronize", "reset_peak_memory_stats", "work", "synchronize"]
    assert free_bytes(gpu.device) == 1000 - (1000 - 300)
    assert gpu.called[-2:] == ["synchronize", "empty_cache"]


def test_rates_of_a_known_gpu_are_taken(gpu, monkeypatch):
    assert device_peak_flops(gpu.device, dtype="bfloat16") == 989e12
    assert device_peak_flops(gpu.device, dtype="float32") is None
    world = SimpleNamespace(wire=gpu.device, device=gpu.device, world_size=1)
    h100 = _link(world)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "NVIDIA L4")
    assert device_peak_flops(gpu.device, dtype="bfloat16") is None
    a100 = _link(world)  # the careful guess for what is not listed
    assert a100 != h100


def test_a_run_records_the_gpus_it_had(gpu):
    assert "NVIDIA H100 80GB HBM3" in str(describe_environment())
