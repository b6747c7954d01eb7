"""What numbers are made with: the config, the code, the packages and the machine."""

from __future__ import annotations

import json
import platform
from pathlib import Path
from typing import Any

import torch

import spmdrl
from spmdrl.config import Config, flatten
from spmdrl.report.user_code import digest, user_files
from spmdrl.report.versions import installed_versions
from spmdrl.world.world import World


def made_with(cfg: Config, world: World) -> dict[str, Any]:
    """Return {config: {field: value}, packages: {name: version}, code: {file: sha256}, machine}."""
    packages = {"python": platform.python_version(), **installed_versions()}
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
    """Return {file: digest} of the package, the program that runs and what else is the user's."""
    package = Path(spmdrl.__file__).parent
    files = {f"spmdrl/{path.relative_to(package)}": path for path in package.rglob("*.py")}
    files |= user_files(cfg)
    return {name: digest(files[name]) for name in sorted(files)}
