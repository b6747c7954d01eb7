"""Samples made by hand, and what engines drew as plain values to compare."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from spmdrl.engine.protocol import Completion
from spmdrl.rollout.episode import FinishedEpisode
from spmdrl.rollout.trajectory import Trajectory
from spmdrl.types import flat


def completion(
    tokens: Sequence[int],
    *,
    key: str = "k",
    logprobs: Sequence[float] = (),
    versions: Sequence[int] = (),
    is_truncated: bool = False,
) -> Completion:
    """Return what an engine may have drawn; by default with logprobs 0 and of version 0."""
    return Completion(
        key,
        flat(tokens, "int64"),
        flat(logprobs or [0.0] * len(tokens), "float32"),
        flat(versions or [0] * len(tokens), "int64"),
        is_truncated,
    )


@dataclass(frozen=True)
class Plain:
    """A completion as tuples."""

    key: str
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[int, ...]
    is_truncated: bool
    routes: Tensor | None


def plain(drawn: Completion) -> Plain:
    """Return a completion as tuples."""
    columns = (drawn.tokens, drawn.logprobs, drawn.versions)
    own = drawn.extra_columns.get("routes")
    routes = None if own is None else own.rows
    return Plain(drawn.key, *(tuple(c.tolist()) for c in columns), drawn.is_truncated, routes)


def finished(engine: Any) -> dict[str, Plain]:
    """Step an engine until it is idle; return by key what that finishes."""
    done: dict[str, Plain] = {}
    while engine.is_busy:
        done |= {c.key: plain(c) for c in engine.step()}
    return done


def trajectory(
    prompt: Sequence[int],
    tokens: Sequence[int],
    *,
    is_sampled: Sequence[bool] = (),
    logprobs: Sequence[float] = (),
    versions: Sequence[int] = (),
    is_truncated: bool = False,
    states: Sequence[int] = (),
    earned: Sequence[float] = (),
) -> Trajectory:
    """Return a prompt and what followed it; by default all sampled, as `completion` has it."""
    drawn = completion(tokens, logprobs=logprobs, versions=versions, is_truncated=is_truncated)
    made = Trajectory.from_prompt(prompt).append_completion(drawn)
    if is_sampled:
        mask = torch.cat([made.response_mask[: len(prompt)], flat(is_sampled, "bool")])
        made = replace(made, response_mask=mask)
    return replace(made, states=tuple(states), earned=tuple(earned))


def values(episode: FinishedEpisode) -> tuple:
    """Return a finished episode as values that compare with ==."""
    columns = vars(episode.trajectory).items()
    plain_columns = {k: v.tolist() if isinstance(v, Tensor) else v for k, v in columns}
    return replace(episode, traces=()), plain_columns
