"""The mapping `model.lora`: what it may hold, and what is wrong with one."""

from __future__ import annotations

import math
import re
from typing import Any

from spmdrl.config.fields import Config
from spmdrl.imports import nearest

ALL_LINEAR = "all-linear"
LORA: dict[str, Any] = {
    "rank": 16,
    "alpha": 32,
    "targets": ALL_LINEAR,
    "use_rslora": False,
    "init": "kaiming",
    "path": "",
    "push": "merged",
}
"""What model.lora may hold, with the defaults that hold when it is not empty."""
_PEFT_NAMES = {
    "r": "rank",
    "lora_alpha": "alpha",
    "target_modules": "targets",
    "init_lora_weights": "init",
}
_INITS = ("kaiming", "gaussian")
_PUSHES = ("merged", "adapter")
MAX_RANK = 512
"""Of vLLM's adapters."""


def lora_problems(cfg: Config) -> list[str]:
    """Return what is wrong with model.lora, each as `field: what, value seen`."""
    options = cfg.model.lora
    problems = [problem for name, value in options.items() for problem in _problems_of(name, value)]
    folder = options.get("path")
    problems += [
        f"model.lora.{name}: {value!r} with path {folder}: the adapter there says it; "
        "leave one of them out"
        for name, value in options.items()
        if folder and name in LORA and name not in ("path", "push")
    ]
    problems += _push_problems(cfg) if options.get("push") == "adapter" else []
    every = cfg.model.reference_options.get("sync_every")
    if options and every and not cfg.model.reference:
        problems.append(
            f"model.reference_options.sync_every: {every} with model.lora, whose reference is the "
            "policy without its adapters, which never changes; leave one of them out"
        )
    elif options and every:
        problems.append(
            f"model.reference_options.sync_every: {every} with model.lora: adapters cannot be "
            "mixed into a reference; leave one of them out"
        )
    return problems


def _push_problems(cfg: Config) -> list[str]:
    problems, rank = [], cfg.model.lora.get("rank", 0)
    if cfg.engine.kind != "vllm":
        problems.append(
            f"model.lora.push: adapter with engine.kind {cfg.engine.kind}: only vllm "
            "computes with adapters of its own; take merged"
        )
    if not cfg.layout.roles.has_engines:
        problems.append(
            "model.lora.push: adapter under placement offline, where there is no "
            "engine to push to; leave it out"
        )
    if cfg.stream.mode == "reload":
        problems.append(
            "model.lora.push: adapter with stream.mode reload: adapters are written in "
            "place; take auto, or push merged"
        )
    if type(rank) is int and rank > MAX_RANK:
        problems.append(
            f"model.lora.push: adapter with rank {rank}: vLLM has adapters up to rank "
            f"{MAX_RANK}; take merged"
        )
    return problems


def _problems_of(name: str, value: Any) -> list[str]:
    place = f"model.lora.{name}"
    if name in ("dropout", "lora_dropout"):
        return [
            f"{place}: {value!r}: there is none: the logprobs before an update and in it must "
            "come out alike; leave it out"
        ]
    if name in _PEFT_NAMES:
        return [f"{place}: unknown option; PEFT's {name} is {_PEFT_NAMES[name]} here"]
    if name not in LORA:
        return [f"{place}: unknown option{nearest(name, LORA)}"]
    is_right, expected = {
        "rank": (type(value) is int and value >= 1, "a number, 1 or more"),
        "alpha": (type(value) in (int, float) and 0 < value < math.inf, "a number above 0"),
        "targets": (
            _are_targets(value),
            f"{ALL_LINEAR}, a regular expression of module names, or a list of names or their ends",
        ),
        "use_rslora": (isinstance(value, bool), "true or false"),
        "init": (value in _INITS, " or ".join(_INITS)),
        "path": (isinstance(value, str) and value, "a folder with an adapter in PEFT's format"),
        "push": (value in _PUSHES, " or ".join(_PUSHES)),
    }[name]
    return [] if is_right else [f"{place}: expected {expected}, got {value!r}"]


def _are_targets(value: Any) -> bool:
    if isinstance(value, list):
        return bool(value) and all(isinstance(v, str) and v for v in value)
    if not isinstance(value, str) or not value:
        return False
    try:
        re.compile(value)
    except re.error:
        return False
    return True
