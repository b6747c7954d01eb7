"""Engines of each kind can do what their traits say, before and after they are built."""

from __future__ import annotations

import ast
from pathlib import Path

from spmdrl.config import EngineSettings
from spmdrl.config.engine_traits import ENGINE_TRAITS
from spmdrl.engine.protocol import AdapterEngine
from spmdrl.engine.transformers.engine import TransformersEngine
from spmdrl.engine.vllm.engine import VllmEngine

CLASSES = {"vllm": VllmEngine, "transformers": TransformersEngine}
ROOT = Path(__file__).parents[2]


def test_each_kind_has_traits_and_a_class_that_fits_them():
    assert CLASSES.keys() == ENGINE_TRAITS.keys()
    for kind, cls in CLASSES.items():
        traits = EngineSettings(kind=kind).traits
        assert traits is ENGINE_TRAITS[kind]
        assert issubclass(cls, AdapterEngine) == traits.has_adapters
        assert cls.sleep_hint and cls.gap_cause


def test_only_the_one_who_builds_an_engine_asks_for_its_kind_by_name():
    found = []
    for path in sorted((ROOT / "spmdrl").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            sides = [node.left, *node.comparators] if isinstance(node, ast.Compare) else []
            names = {side.value for side in sides if isinstance(side, ast.Constant)}
            texts = " ".join(map(ast.unparse, sides))
            if names & CLASSES.keys() and "kind" in texts:
                found.append(path.relative_to(ROOT / "spmdrl").as_posix())
    assert found == ["engine/__init__.py"]
