"""The mapping `model.moe`: what it may hold, and what is wrong with one."""

from __future__ import annotations

import math
from typing import Any

from spmdrl.config.fields import Config
from spmdrl.imports import nearest

MOE: dict[str, Any] = {"balance": "none", "coef": 0.001, "rate": 0.001, "replay": False}
"""What model.moe may hold, with the defaults."""
_OF_BALANCE = {"coef": "aux", "rate": "bias"}
_CHOICES = ("none", *_OF_BALANCE.values())


def moe_problems(cfg: Config) -> list[str]:
    """Return what is wrong with model.moe, each as `field: what, value seen`."""
    options, problems = cfg.model.moe, []
    balance = options.get("balance", "none")
    if balance == "bias" and cfg.model.lora:
        problems.append(
            "model.moe.balance: bias with model.lora, which leaves the model's own "
            "tensors as they are; leave one of them out"
        )
    for name, value in options.items():
        place = f"model.moe.{name}"
        if name not in MOE:
            problems.append(f"{place}: unknown option{nearest(name, MOE)}")
        elif name == "balance":
            if value not in _CHOICES:
                problems.append(f"{place}: expected one of {', '.join(_CHOICES)}; got {value!r}")
        elif name == "replay":
            problems += _replay_problems(cfg, value)
        elif type(value) not in (int, float) or not 0 < value < math.inf:
            problems.append(f"{place}: expected a number above 0, got {value!r}")
        elif balance != _OF_BALANCE[name]:
            problems.append(
                f"{place}: is an option of balance {_OF_BALANCE[name]}, and balance is "
                f"{balance}; take it out"
            )
    return problems


def _replay_problems(cfg: Config, value: Any) -> list[str]:
    if type(value) is not bool:
        return [f"model.moe.replay: expected true or false, got {value!r}"]
    if value and not cfg.objective.samples:
        return [
            "model.moe.replay: true with the objective " + cfg.algorithm.objective + ", where "
            "no engine chooses experts that could be replayed; take it out"
        ]
    return []
