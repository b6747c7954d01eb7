"""Groups that are under way, as plain values for a checkpoint, and back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, fields
from typing import Any

from spmdrl.environments.plain_state import PLAIN
from spmdrl.errors import Refusal
from spmdrl.rollout.episode import Draw, Episode, FinishedEpisode, Group, Trajectory
from spmdrl.types import Prompt
from spmdrl.workers.pool import RewardResult


def group_to_dict(group: Group, unfinished: Sequence[Episode]) -> dict[str, Any]:
    """Return a group as dictionaries, tensors and numbers. The prompt is known by step and slot.

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
                "prompt": s.prompt.text,
                "trajectory": s.trajectory.plain(),
                "text": s.text,
                "reward": asdict(s.reward),
            }
            for s in group.samples.values()
        ],
        "episodes": [_episode_to_dict(e) for e in unfinished if e.group is group],
    }


def _episode_to_dict(episode: Episode) -> dict[str, Any]:
    plain = {f.name: getattr(episode, f.name) for f in fields(episode) if f.name != "group"}
    # As text: torch.load with weights_only takes no bytes.
    return plain | {
        "trajectory": episode.trajectory.plain(),
        "environment": episode.environment.decode("latin-1"),
    }


def check_environments(states: Sequence[dict[str, Any]], *, trusts_pickles: bool) -> None:
    """Refuse environments that a checkpoint holds as pickles, which run code when they are loaded.

    Args:
        states: of all replicas, as the checkpoint has them.
    Raises: Refusal saying how to allow it.
    """
    held = [e["environment"] for s in states for g in s["waiting"] for e in g["episodes"]]
    held = [text for text in held if text]
    pickled = [text for text in held if not text.startswith(PLAIN.decode())]
    if pickled and not trusts_pickles:
        raise Refusal(
            f"the checkpoint's rollouts_*.pt hold {len(pickled)} of {len(held)} environments under "
            "way as pickles, which can run any code. If you trust the writer of the checkpoint, "
            "resume by --checkpoint.trust-pickles true; environments of plain attributes, or with "
            "`save` and `restore`, need no pickles (docs/environments.md)"
        )


def group_from_dict(
    plain: dict[str, Any], *, number: int, draw: Draw, prompt: Prompt
) -> tuple[Group, list[Episode]]:
    """Return a group and its unfinished episodes; undoes `group_to_dict`."""
    group = Group(number, plain["step"], plain["slot"], prompt, plain["version"], draw)
    for s in plain["samples"]:
        trajectory = Trajectory.restored(s["trajectory"])
        group.samples[s["sample"]] = FinishedEpisode(
            group.slot,
            s["sample"],
            trajectory.opened(prompt, text=s["prompt"]),
            trajectory,
            s["text"],
            RewardResult(**s["reward"]),
        )
    episodes = [
        Episode(
            group,
            **e
            | {
                "trajectory": Trajectory.restored(e["trajectory"]),
                "environment": e["environment"].encode("latin-1"),
                "info": dict(e["info"]),
            },
        )
        for e in plain["episodes"]
    ]
    return group, episodes
