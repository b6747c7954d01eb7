"""What numbers are made with: the config, the code, the packages and the machine."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import platform
import re
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

import spmdrl
from spmdrl.config import Config, flatten
from spmdrl.imports import attempt
from spmdrl.report.provenance import describe_environment
from spmdrl.world.world import World

_CODE = re.compile(r"(.+\.py|[A-Za-z_][\w.]*):\w+")
"""`path/file.py:NAME` and `module:NAME`."""


def made_with(cfg: Config, world: World) -> dict[str, Any]:
    """Return {config: {field: value}, packages: {name: version}, code: {file: sha256}, machine}."""
    environment = describe_environment()
    packages = {"python": environment["python"], **environment["packages"]}
    return {
        "config": config_of(cfg),
        "packages": packages | ({"cuda": torch.version.cuda} if torch.version.cuda else {}),
        "code": _code(cfg),
        "machine": {
            "device": device_name(world.device),
            "processor": platform.machine(),
            "kernels": torch.backends.cpu.get_cpu_capability(),
            "threads": torch.get_num_threads(),
        },
    }


def config_of(cfg: Config) -> dict[str, Any]:
    """Return {field: value}, as JSON has them; without output_dir, which is no part of a run."""
    fields = json.loads(json.dumps(flatten(cfg)))
    return {name: value for name, value in fields.items() if name != "output_dir"}


def device_name(device: torch.device) -> str:
    """Return what a device is called where it counts for numbers."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def _code(cfg: Config) -> dict[str, str]:
    """Return {file: first 16 digits of its sha256} of the package, the program that runs and what
    the config names of the user's."""
    package = Path(spmdrl.__file__).parent
    files = {f"spmdrl/{path.relative_to(package)}": path for path in package.rglob("*.py")}
    program = Path(sys.argv[0])
    if program.name == "train.py":
        files[program.name] = program
    files |= dict(_named(cfg))
    return {name: _digest(files[name]) for name in sorted(files) if files[name].is_file()}


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


def _named(cfg: Config) -> Iterator[tuple[str, Path]]:
    """Yield the files of the user's own that a config names, under `field: name`."""
    for field, value in flatten(cfg).items():
        for place in _CODE.findall(json.dumps(value).replace('"', "\n")):
            path = Path(place).expanduser()
            if not place.endswith(".py"):
                kinds = (ImportError, ValueError)
                spec, _ = attempt(partial(importlib.util.find_spec, place), kinds)
                path = Path(spec.origin) if spec and spec.origin else Path()
            if Path(spmdrl.__file__).parent not in path.parents:
                yield f"{field}: {Path(place).name}", path
