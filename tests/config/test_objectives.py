"""The table of objectives: complete, and all that the rooms know of one."""

from __future__ import annotations

import re
import typing
from pathlib import Path

from spmdrl import config
from spmdrl.algorithms import registry
from spmdrl.config import AlgorithmSettings, Config
from spmdrl.config.objectives import OBJECTIVES

PACKAGE = Path(config.__file__).parents[1]


def test_every_objective_has_its_entry():
    assert (
        set(typing.get_args(typing.get_type_hints(AlgorithmSettings)["objective"]))
        == OBJECTIVES.keys()
    )
    for name, objective in OBJECTIVES.items():
        assert Config(algorithm=AlgorithmSettings(objective=name)).objective is objective
        named = registry.names(objective.loss_kind)
        assert objective.only_loss in named if objective.only_loss else named


def test_nobody_compares_the_name_of_an_objective():
    compared = re.compile(r"\bobjective\s*([!=]=|(not )?in \()")
    files = [*PACKAGE.rglob("*.py"), PACKAGE.parent / "train.py"]
    assert [str(f) for f in files if compared.search(f.read_text())] == []
