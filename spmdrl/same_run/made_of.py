"""What a run is made of."""

from __future__ import annotations

import platform
from pathlib import Path
from typing import Any

import torch

import spmdrl
from spmdrl.config import Config
from spmdrl.imports import installed_versions
from spmdrl.same_run.data_files import data_digests
from spmdrl.same_run.differences import config_of
from spmdrl.same_run.user_code import digest, user_files
from spmdrl.world.torch_internals import flash_version
from spmdrl.world.world import World


def made_of(cfg: Config, world: World) -> dict[str, dict[str, Any]]:
    """Return everything that the numbers of a run depend on, as JSON values.

    Call it after the models are built, which choose kernels.

    Returns: {config: {field: value}, packages: {name: version}, code: {file: digest}, data:
        {source: digest}, machine: {property: value}}.
    Raises: Refusal for a file of rows that cannot be read.
    """
    packages = {"python": platform.python_version(), **installed_versions()}
    if torch.version.cuda:
        packages["cuda"] = torch.version.cuda
    package = Path(spmdrl.__file__).parent
    files = {f"spmdrl/{path.relative_to(package)}": path for path in package.rglob("*.py")}
    files |= user_files(cfg)
    machine: dict[str, Any] = {
        "device": device_name(world.device),
        "processor": platform.machine(),
        "kernels": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
    }
    if world.device.type == "cuda":
        machine["attention"] = f"FlashAttention {flash_version()}"
    return {
        "config": config_of(cfg),
        "packages": packages,
        "code": {name: digest(files[name]) for name in sorted(files)},
        "data": data_digests(cfg),
        "machine": machine,
    }


def device_name(device: torch.device) -> str:
    """Return the name of a GPU, or `cpu`."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
