"""Groups that are under way, as plain values for a checkpoint, and back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, fields
from typing import Any

from spmdrl.environments.plain_state import PICKLED, PLAIN
from spmdrl.errors import Refusal
from spmdrl.rollout.episode import Draw, Episode, FinishedEpisode, Group, Trajectory
from spmdrl.types import Prompt, Tokens, flat
from spmdrl.workers.pool import RewardResult

FORMAT = 2
"""Of what `group_to_dict` returns; in format 1 tokens were lists, apart from their prompt."""


def group_to_dict(group: Group, unfinished: Sequence[Episode]) -> dict[str, Any]:
    """Return a group as dictionaries, tensors and numbers. The prompt is known by step and slot.

    Args:
        unfinished: episodes, of this group and others, with what was drawn so far.
    """
    return {
        "format": FORMAT,
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
    # As text: what loads a checkpoint without running code in it takes no bytes.
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
            "way as pickles, which run whatever their writer put there. If you trust who wrote the "
            "checkpoint, resume by --checkpoint.trust-pickles true; environments of plain "
            "attributes, or with `save` and `restore`, need none (docs/environments.md)"
        )


def _packed_of(text: str) -> bytes:
    """Return a packed environment; earlier versions wrote the pickle alone."""
    packed = text.encode("latin-1")
    return PICKLED + packed if packed[:1] not in (b"", PLAIN, PICKLED) else packed


def group_from_dict(
    plain: dict[str, Any], *, number: int, draw: Draw, prompt: Prompt
) -> tuple[Group, list[Episode]]:
    """Return a group and its unfinished episodes; undoes `group_to_dict`.

    Raises: Refusal for a format of a later version.
    """
    if plain.get("format", 1) > FORMAT:
        raise Refusal(
            f"the checkpoint holds groups under way in format {plain['format']}, of a later "
            f"version; this one reads up to {FORMAT}: resume with the version that wrote it"
        )
    if "format" not in plain:
        plain = _from_format_1(plain, prompt)
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
                "environment": _packed_of(e["environment"]),
                "info": dict(e["info"]),
            },
        )
        for e in plain["episodes"]
    ]
    return group, episodes


def _from_format_1(plain: dict[str, Any], prompt: Prompt) -> dict[str, Any]:
    """Return a group of format 1 in the present one."""
    samples = [
        {**s, "prompt": s["prompt"][1], "trajectory": _joined(s["prompt"][0], s["response"])}
        for s in plain["samples"]
    ]
    episodes = [
        {**e, "trajectory": _joined(e["opening"] or prompt.tokens, e["response"])}
        for e in plain["episodes"]
    ]
    for old in (*samples, *episodes):
        del old["response"]
    for old in episodes:
        del old["opening"]
    return {**plain, "samples": samples, "episodes": episodes}


def _joined(prompt: Sequence[int], response: dict[str, Any]) -> dict[str, Any]:
    """Return the trajectory of a prompt and a response of format 1."""
    following = Tokens(
        tokens=flat(response["tokens"], "int64"),
        response_mask=flat(response["is_sampled"], "bool"),
        rollout_logprobs=flat(response["logprobs"], "float32"),
        policy_versions=flat(response["versions"], "int64"),
    )
    return Tokens.concat([Tokens.given(prompt), following]).columns() | {
        "routes": response["routes"],
        "num_given": len(prompt),
        "is_truncated": response["is_truncated"],
        "states": tuple(response["states"]),
        "earned": tuple(response["earned"]),
    }
