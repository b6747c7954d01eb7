"""What the installed vLLM has, read in its sources: importing vLLM takes seconds and sets up much
that the engine has to set up in its own way."""

from __future__ import annotations

import ast
import importlib.util
from functools import cache
from pathlib import Path


def engine_argument_names() -> tuple[str, ...]:
    """Return the names of vLLM's EngineArgs; () where vLLM is not installed."""
    lines: list[ast.stmt] = []
    for node in _parse("engine/arg_utils.py").body:
        if isinstance(node, ast.ClassDef) and node.name == "EngineArgs":
            lines = node.body
    names = []
    for line in lines:
        if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name):
            names.append(line.target.id)
    return tuple(name for name in names if not name.startswith("_"))


@cache
def cpu_head_sizes() -> tuple[int, ...]:
    """Return the sizes of heads that vLLM's attention on the CPU has; () where vLLM is not
    installed, or does not list them there."""
    for node in ast.walk(_parse("v1/attention/backends/cpu_attn.py")):
        if isinstance(node, ast.FunctionDef) and node.name == "get_supported_head_sizes":
            (sizes,) = (line.value for line in node.body if isinstance(line, ast.Return))
            return tuple(ast.literal_eval(ast.unparse(sizes))) if sizes else ()
    return ()


def has_cache_layouts() -> bool:
    """Return whether the cache of a layer has a layout that its backend names, as in vLLM 0.32."""
    nodes = _parse("v1/kv_cache_layout.py").body
    return any(isinstance(node, ast.ClassDef) and node.name == "KVCacheLayout" for node in nodes)


@cache
def own_classes() -> frozenset[str]:
    """Return the names of transformers' classes that vLLM has classes of its own for; empty where
    vLLM is not installed, or does not list them there."""
    names = []
    for node in _parse("model_executor/models/registry.py").body:
        table = node.value if isinstance(node, ast.Assign | ast.AnnAssign) else None
        if not isinstance(table, ast.Dict):
            continue
        for key, value in zip(table.keys, table.values, strict=True):
            if not isinstance(key, ast.Constant) or not isinstance(value, ast.Tuple):
                continue
            if ast.unparse(value.elts[0]) != "'transformers'":
                names.append(str(key.value))
    return frozenset(names)


def _parse(file: str) -> ast.Module:
    """Return a file of vLLM, parsed; an empty one where there is none."""
    found = importlib.util.find_spec("vllm")
    if found is None or found.origin is None:
        return ast.Module([], [])
    path = Path(found.origin).parent / file
    return ast.parse(path.read_text()) if path.is_file() else ast.Module([], [])
