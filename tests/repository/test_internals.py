"""Private names of torch, transformers and vLLM stand in the files named here."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
HOMES = (
    "spmdrl/world/torch_internals.py",
    "spmdrl/model/transformers_internals.py",
    "spmdrl/engine/vllm/internals.py",
    "spmdrl/engine/vllm/patches.py",
    "spmdrl/engine/vllm/expert_adapters.py",
)
# Documented plugin interfaces: parsers, which are needed below the engines, and a loader; what is
# loaded once for the ranks of a proof is not used there.
IMPORTING_VLLM = (
    *HOMES,
    "spmdrl/environments/tool_calls.py",
    "spmdrl/engine/vllm/images.py",  # processed inputs, which its multimodal processors yield
    "spmdrl/engine/vllm/arguments.py",
    "spmdrl/engine/vllm/exact.py",  # a model from outside its tree
    "spmdrl/engine/vllm/families.py",
    "spmdrl/engine/vllm/requests.py",
    "spmdrl/tools/proof/preloaded.py",
)
# Whose underscored attributes are ours, or Python's.
OWN = {"self", "cls", "own", "world", "os", "sys"}
PUBLIC = {"_asdict", "_fields", "_make", "_replace"}  # of a NamedTuple
ASKING = {"getattr", "hasattr", "setattr", "delattr", "attrgetter", "methodcaller"}
FIELDS = {"_no_split_modules", "_tp_plan", "_apply_gate", "_can_record_outputs"}


def _imported(node: ast.AST) -> list[str]:
    if isinstance(node, ast.ImportFrom) and node.module:
        return [f"{node.module}.{alias.name}" for alias in node.names]
    return [alias.name for alias in node.names] if isinstance(node, ast.Import) else []


def _is_private(name: str) -> bool:
    return name[:1] == "_" and name[:2] != "__"


def _private(node: ast.AST) -> Iterator[str]:
    """Yield what a piece of a file other than HOMES should not say."""
    for name in _imported(node):
        library, *rest = name.split(".")
        if library in ("torch", "transformers", "liger_kernel") and any(p[0] == "_" for p in rest):
            yield f"imports {name}"
    is_private = isinstance(node, ast.Attribute) and _is_private(node.attr)
    if is_private and node.attr not in PUBLIC:
        if not (isinstance(node.value, ast.Name) and node.value.id in OWN):
            yield ast.unparse(node)
    if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value in FIELDS:
        yield node.value
    if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in ASKING:
        said = [a.value for a in node.args if isinstance(a, ast.Constant)]
        yield from (f"asks for {a}" for a in said if isinstance(a, str) and _is_private(a))


def test_private_names_of_libraries_stand_in_one_file_each():
    found = []
    for path in sorted((ROOT / "spmdrl").rglob("*.py")):
        file = path.relative_to(ROOT).as_posix()
        for node in ast.walk(ast.parse(path.read_text())):
            place = f"{file}:{getattr(node, 'lineno', 0)}"
            if file not in HOMES:
                found += [f"{place} {what}" for what in _private(node)]
            if file not in IMPORTING_VLLM:
                found += [f"{place} imports {n}" for n in _imported(node) if n[:4] == "vllm"]
    assert not found, "\n".join(found)


def test_each_private_name_says_when_it_can_go():
    for home in HOMES:
        tree = ast.parse((ROOT / home).read_text())
        table = ast.get_docstring(tree)
        assert "Serves" in table, home
        for node in tree.body:
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and node.name[0] != "_":
                assert node.name in table, f"{home}: {node.name} is not in the table of its file"
