"""The parts of the loop by name: all are there, and nothing loads before it is asked for."""

from __future__ import annotations

import ast
import inspect
import subprocess
import sys
from pathlib import Path

import pytest

from spmdrl import api

ROOT = Path(__file__).parents[2]


def test_every_part_is_found_and_mypy_sees_the_same_parts() -> None:
    typed = {
        alias.name: node.module
        for node in ast.walk(ast.parse(inspect.getsource(api)))
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("spmdrl.")
        for alias in node.names
    }
    assert typed == api._MODULES
    for name, module in typed.items():
        part = getattr(api, name)
        home = sys.modules[module]
        assert part is getattr(home, name)


def test_a_name_that_is_no_part_is_refused_with_those_that_are() -> None:
    with pytest.raises(AttributeError, match=r"no Trainers; it has .*Trainer"):
        _ = api.Trainers


def test_help_loads_no_torch() -> None:
    code = (
        "import sys, runpy\n"
        "sys.argv = ['train.py', '--help']\n"
        "try: runpy.run_path('train.py', run_name='__main__')\n"
        "except SystemExit: pass\n"
        "assert 'spmdrl.api' in sys.modules and 'torch' not in sys.modules\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0 and "--config FILE" in done.stdout, done.stderr
