"""The page of methods says what the docstrings say, and leaves nothing out."""

from __future__ import annotations

import importlib
import pkgutil
import typing
from pathlib import Path

import pytest

import spmdrl.algorithms
from spmdrl.algorithms import registry
from spmdrl.commands import catalogue

PAGE = Path(__file__).parents[1] / "docs" / "algorithms.md"


def test_the_page_of_methods_is_that_of_the_docstrings():
    assert PAGE.read_text() == catalogue.page(), (
        "run `python -m spmdrl catalogue > docs/algorithms.md`"
    )


def test_every_method_of_every_kind_is_on_the_page():
    page = catalogue.page()
    for kind in typing.get_args(registry.Kind):
        for name in registry.names(kind):
            assert f"| `{name}` |" in page, (kind, name)


def test_no_module_with_methods_is_forgotten():
    listed = {name for module in registry.MODULES.values() for name in module}
    listed |= set(catalogue.BY_IMPORT)
    for module in pkgutil.iter_modules(spmdrl.algorithms.__path__, "spmdrl.algorithms."):
        if getattr(importlib.import_module(module.name), "__all__", None):
            assert module.name in listed, f"{module.name} has methods that no kind lists"


def unsourced(x: float) -> float:
    """Return x."""
    return x


def test_a_method_without_a_source_is_refused():
    with pytest.raises(ValueError, match="unsourced: its docstring needs"):
        catalogue.describe(unsourced)
