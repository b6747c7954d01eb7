"""Groups that are under way, as plain values for a checkpoint, and back."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import asdict, fields, replace
from typing import Any

from spmdrl.rollout.episode import Draw, Episode, Group, Response, Sample
from spmdrl.types import Prompt
from spmdrl.workers.pool import RewardResult


def group_to_dict(group: Group, unfinished: Sequence[Episode]) -> dict[str, Any]:
    """Return a group as dictionaries, lists and numbers. The prompt is known by step and slot.

    Args:
        unfinished: episodes, of this group and others, with what was drawn so far.
    """
    return {
        "step": group.step,
        "slot": group.slot,
        "version": group.version,
        "samples": [
            {
                "sample": s.sample,
                "prompt": (list(s.prompt.tokens), s.prompt.text),
                "response": asdict(s.response),
                "text": s.text,
                "reward": asdict(s.reward),
            }
            for s in group.samples.values()
        ],
        "episodes": [_episode_to_dict(e) for e in unfinished if e.group is group],
    }


def _episode_to_dict(episode: Episode) -> dict[str, Any]:
    plain = {f.name: getattr(episode, f.name) for f in fields(episode) if f.name != "group"}
    # As text: what loads a checkpoint without running code in it takes no bytes.
    return plain | {
        "response": asdict(episode.response),
        "environment": episode.environment.decode("latin-1"),
    }


def group_from_dict(
    plain: dict[str, Any], *, number: int, draw: Draw, prompt: Prompt
) -> tuple[Group, list[Episode]]:
    """Return a group and its unfinished episodes; undoes `group_to_dict`."""
    plain = copy.deepcopy(plain)  # episodes go on in their lists
    group = Group(number, plain["step"], plain["slot"], prompt, plain["version"], draw)
    for s in plain["samples"]:
        group.samples[s["sample"]] = Sample(
            group.slot,
            s["sample"],
            _prompt(s, prompt),
            Response(**s["response"]),
            s["text"],
            RewardResult(**s["reward"]),
        )
    episodes = [
        Episode(
            group,
            **e
            | {
                "response": Response(**e["response"]),
                "environment": e["environment"].encode("latin-1"),
            },
        )
        for e in plain["episodes"]
    ]
    return group, episodes


def _prompt(sample: dict[str, Any], prompt: Prompt) -> Prompt:
    """Return the row's prompt with the ids and the text that this sample saw."""
    tokens, text = sample["prompt"]
    return replace(prompt, tokens=tuple(tokens), text=text)
