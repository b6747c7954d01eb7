"""Episodes whose agents branch: finished samples of several traces, in groups."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from spmdrl.rollout.episode import Draw, FinishedEpisode, Group, Trajectory
from spmdrl.types import Prompt, flat
from spmdrl.workers.pool import RewardResult

FIRST, LAST = 8, 96
"""Token ids are drawn from this range."""
Part = tuple[str, list[int]]
"""A part of a trace: `context`, or `sampled` for what this trace is trained on; its ids."""


def ids(count: int, seed: int) -> list[int]:
    """Return ids drawn with a seed."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(FIRST, LAST, (count,), generator=generator).tolist()


def trace(*parts: Part, is_truncated: bool = False) -> Trajectory:
    """Return a trace of these parts, with a turn for each sampled one.

    Logprobs are numbers near those of a random model, each from its token and place.
    """
    tokens = [token for _, own in parts for token in own]
    mask = [kind == "sampled" for kind, own in parts for _ in own]
    places = range(len(tokens))
    logprobs = [
        -4.5 + 0.2 * math.sin(7 * t + at) if m else 0.0 for at, t, m in zip(places, tokens, mask)
    ]
    turns = sum(kind == "sampled" for kind, _ in parts)
    return Trajectory(
        tokens=flat(tokens, "int64"),
        response_mask=flat(mask, "bool"),
        rollout_logprobs=flat(logprobs, "float32"),
        policy_versions=flat([0 if m else -1 for m in mask], "int64"),
        num_prompt_tokens=len(parts[0][1]),
        is_truncated=is_truncated,
        states=(-1,) * turns,
        earned=(0.0,) * turns,
    )


def traces_of(prompt: list[int], kind: str, seed: int) -> tuple[Trajectory, ...]:
    """Return the traces of an episode.

    Args:
        kind: `plain`, one answer; `turns`, two with a message between; `retry`, two samples of one
            request, each continued; `compacted`, a second request forgets what a tool said, and a
            last one begins with a summary.
    """
    first, second, third = (ids(n, 10 * seed + n) for n in (4, 6, 3))
    told, other = ids(18, 10 * seed + 8), ids(2, 10 * seed + 9)
    if kind == "plain":
        return (trace(("context", prompt), ("sampled", second)),)
    opening = trace(("context", prompt), ("sampled", first), ("context", told), ("sampled", second))
    if kind == "turns":
        return (opening,)
    if kind == "retry":
        again = trace(
            ("context", prompt), ("sampled", third), ("context", other), ("sampled", first)
        )
        return opening, again
    assert kind == "compacted"
    known = ("context", prompt), ("context", first)
    cut = trace(*known, ("context", told[:17] + other), ("sampled", third))
    summary = trace(("context", other + prompt[:9]), ("sampled", second[:2]))
    return opening, cut, summary


def episodes(
    kinds: Sequence[Sequence[str]], *, rewards: Sequence[float] = (), prompt_length: int = 20
) -> list[FinishedEpisode]:
    """Return finished episodes, those of each group with one prompt.

    Args:
        kinds: of each group, the kinds of its episodes.
        rewards: of the episodes, one after another; by default different ones.
        prompt_length: tokens.
    """
    found = []
    for group, own in enumerate(kinds):
        prompt = ids(prompt_length, 1000 + group)
        for sample, kind in enumerate(own):
            number = len(found)
            value = rewards[number] if rewards else math.cos(3.0 * number + 1)
            found.append(
                FinishedEpisode(
                    group,
                    sample,
                    Prompt(group, tuple(prompt), f"prompt {group}", {}),
                    traces_of(prompt, kind, number),
                    f"answer {number}",
                    RewardResult("", value),
                )
            )
    return found


def group_of(samples: Sequence[FinishedEpisode]) -> Group:
    """Return the finished group of samples of one prompt."""
    first = samples[0]
    draw = Draw(0, "train", len(samples), 64, 1.0, True, ())
    group = Group(first.slot, 0, first.slot, first.prompt, 0, draw)
    group.samples = {sample.sample: sample for sample in samples}
    return group
