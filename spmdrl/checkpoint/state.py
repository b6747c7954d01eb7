"""The parts of a run that a checkpoint saves, and their state as tensors."""

from __future__ import annotations

import random
from typing import Any, Protocol

import torch
from torch import Tensor

from spmdrl.model.tensor_parts import BlockValues


class Saved(Protocol):
    """A policy that can be saved."""

    def state_dict(self) -> dict[str, Any]:
        """Return the live tensors, nested by name."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the dictionary that `state_dict` returned, whose tensors were filled in place."""


class SavedSource(Protocol):
    """A source of rollouts that can be saved."""

    def state_dict(self) -> dict[str, Any] | None:
        """Return tensors and plain values; None where this rank has no state."""

    def load_state_dict(self, states: list[dict[str, Any]], step: int) -> None:
        """Load the states of all ranks that had one."""

    def start(self, step: int) -> None:
        """Note that the run goes on with this step."""


def leaves(state: dict[str, Any], prefix: str = "") -> dict[str, Tensor | BlockValues]:
    """Return the tensors of a nested state, the same objects, by dotted name.

    `param_groups` follow from the config and are left out. Raises: AssertionError on any other
    value that is not a tensor, since it would be lost.
    """
    found: dict[str, Tensor | BlockValues] = {}
    for key, value in state.items():
        name = f"{prefix}{key}"
        if key == "param_groups":
            continue
        if isinstance(value, dict):
            found |= leaves(value, f"{name}.")
        else:
            is_known = isinstance(value, (Tensor, BlockValues))
            assert is_known, f"{name} is a {type(value).__name__}, not a tensor"
            found[name] = value
    return found


def tensor_leaves(state: dict[str, Any]) -> dict[str, Tensor]:
    """Return the same with all values of `BlockValues`, one per element, in a tensor."""
    return {
        name: leaf.tensor if isinstance(leaf, BlockValues) else leaf
        for name, leaf in leaves(state).items()
    }


def rng_state() -> dict[str, Any]:
    """Return this process's random generators, for code that does not key its draws."""
    state: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate()}
    if torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_rng_state(state: dict[str, Any]) -> None:
    """Load the state that `rng_state` returned."""
    torch.set_rng_state(state["torch"])
    random.setstate(state["python"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
