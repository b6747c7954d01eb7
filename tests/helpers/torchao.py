"""torchao, which `make test` puts into a folder of its own."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(sys.prefix) / "torchao"))  # ranks inherit it
needs_torchao = pytest.mark.skipif(
    importlib.util.find_spec("torchao") is None,
    reason="torchao is not installed: make .venv/torchao",
)
