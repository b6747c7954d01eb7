"""The page of methods says what the docstrings say, and leaves nothing out."""

from __future__ import annotations

import importlib
import pkgutil
import re
import shlex
import typing
from pathlib import Path

import pytest

import spmdrl.algorithms
from spmdrl.algorithms import registry
from spmdrl.algorithms.combinations import COMBINATIONS, combination
from spmdrl.check.settings import validate
from spmdrl.config.read import with_flags
from spmdrl.errors import Refusal
from spmdrl.tools.commands import catalogue
from tests.helpers.built import good

PAGE = Path(__file__).parents[2] / "docs" / "algorithms.md"
METHODS = PAGE.with_name("methods.md")


def test_the_page_of_methods_is_that_of_the_docstrings():
    assert PAGE.read_text() == catalogue.page(), (
        "run `python -m spmdrl catalogue > docs/algorithms.md`"
    )


def test_every_method_of_every_kind_is_on_the_page():
    page = catalogue.page()
    for kind in typing.get_args(registry.Kind):
        for name in registry.names(kind):
            assert f"| `{name}` |" in page, (kind, name)


def test_the_page_says_from_where_each_method_is_imported():
    said = dict(re.findall(r"^`from (\S+) import ([^`]*)`\.$", catalogue.page(), flags=re.M))
    for kind in typing.get_args(registry.Kind):
        found = {
            name: getattr(importlib.import_module(module), name)
            for module in (f"spmdrl.algorithms.{own}" for own in registry.MODULES[kind])
            for name in said[module].split(", ")
        }
        assert found == {name: registry.get(kind, name) for name in registry.names(kind)}


def test_no_module_with_methods_is_forgotten():
    listed = {f"spmdrl.algorithms.{name}" for own in registry.MODULES.values() for name in own}
    listed |= set(catalogue.BY_IMPORT)
    for module in pkgutil.walk_packages(spmdrl.algorithms.__path__, "spmdrl.algorithms."):
        if getattr(importlib.import_module(module.name), "__all__", None):
            assert module.name in listed, f"{module.name} has methods that no kind lists"


def unsourced(x: float) -> float:
    """Return x."""
    return x


def test_a_method_without_a_source_is_refused():
    with pytest.raises(ValueError, match="unsourced: its docstring needs"):
        catalogue.describe(unsourced)


@pytest.mark.parametrize("name", COMBINATIONS)
def test_a_name_that_is_a_combination_is_told_by_flags_that_are_valid(name):
    words = shlex.split(COMBINATIONS[name][0])
    assert validate(with_flags(good(), words)) == []
    for kind in ("loss", "advantage"):
        if name not in registry.names(kind):
            with pytest.raises(Refusal, match=f"{name} is a combination of settings here: --alg"):
                registry.get(kind, name)


def test_other_spellings_of_a_combination_are_known_and_none_is_invented():
    assert "clip higher" in combination("DAPO") and "dr_grpo" in combination("Dr.GRPO")
    assert combination("sapo") == ""


@pytest.mark.parametrize("kind", ["loss", "advantage", "token_advantage"])
def test_what_a_method_may_ask_for_stands_beside_the_names_of_other_programs(kind):
    table = [line for line in METHODS.read_text().splitlines() if line.startswith("| `")]
    named = {name for line in table for name in re.findall(r"`(\w+)`", line.split("|")[1])}
    assert {*registry.INPUTS[kind]} <= named
