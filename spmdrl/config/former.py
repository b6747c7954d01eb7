"""Fields that were spelled otherwise: what they are now.

A config file or flag with a former spelling is refused with the present one; checkpoints and
config.yaml of former runs are read by it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from spmdrl.config.tree import item_fields, sections, settings

_MOVED = {
    "algorithm.entropy_options": "algorithm.entropy_control",
    "critic.options": "critic",
    "model.reference_options": "model.reference",
    "optimizer.options": "optimizer",
    "optimizer.schedule_options": "optimizer",
}
_KL_CONTROL = ("target", "horizon")


def present(name: str, value: Any) -> dict[str, Any] | None:
    """Return a former field by its present names; None for one that is spelled so now."""
    if name == "model.reference" and isinstance(value, str):
        return {"model.reference.path": value}
    if not isinstance(value, dict):
        return {} if name in _MOVED else None
    if name == "algorithm.kl_options" and any(key in value for key in _KL_CONTROL):
        own = {key: v for key, v in value.items() if key not in _KL_CONTROL}
        moved = {key: v for key, v in value.items() if key in _KL_CONTROL}
        return {f"algorithm.kl_control.{key}": v for key, v in moved.items()} | (
            {name: own} if own else {}
        )
    if name not in _MOVED:
        return None
    flat = {f"{_MOVED[name]}.{key}": v for key, v in value.items()}
    cache = flat.get("model.reference.cache")
    if isinstance(cache, str):
        flat |= {"model.reference.cache": True, "model.reference.cache_folder": cache}
    return flat


def modernized(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a run of any version wrote, by the present names of the fields.

    Args:
        flat: {dotted name: value}; sections of today may be mappings in it.
    """
    found: dict[str, Any] = {}
    for name, value in flat.items():
        now = present(name, value)
        if now is not None:
            found |= now
        elif name in sections() and isinstance(value, dict):
            found |= {f"{name}.{key}": v for key, v in value.items()}
        else:
            found[name] = _whole_items(name, value)
    lora = {name for name in found if name.startswith("model.lora.")}
    if lora and not lora & {"model.lora.rank", "model.lora.path"}:
        found["model.lora.rank"] = 16  # of all adapters that did not say it
    return found


def _whole_items(name: str, value: Any) -> Any:
    """Return a value in which items of a list, where they have fields, have those too that came
    later, with their defaults."""
    cls = item_fields(settings().get(name))
    if cls is None or not isinstance(value, (list, tuple)):
        return value
    default = dataclasses.asdict(cls())
    return [default | item if isinstance(item, dict) else item for item in value]
