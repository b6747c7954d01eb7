"""Groups under way in a checkpoint: as plain values and back, and dealt to the job's replicas."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from spmdrl.environments.plain_state import PLAIN
from spmdrl.errors import Refusal
from spmdrl.rollout.balance import deal, deal_again
from spmdrl.rollout.book import Book
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
                "trajectory": s.trajectory.state_dict(),
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
        "trajectory": episode.trajectory.state_dict(),
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
        trajectory = Trajectory.from_state_dict(s["trajectory"])
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
                "trajectory": Trajectory.from_state_dict(e["trajectory"]),
                "environment": e["environment"].encode("latin-1"),
                "info": dict(e["info"]),
            },
        )
        for e in plain["episodes"]
    ]
    return group, episodes


# --------------------------------------------------------------------------- dealt to replicas


@dataclass(frozen=True)
class Share:
    """A replica's share of the prompts."""

    replica: int
    replicas: int
    is_shared: bool
    """All replicas keep one book."""

    @property
    def part(self) -> int:
        """Return the replica's part in its book."""
        return self.replica if self.is_shared else 0

    @property
    def keepers(self) -> int:
        """Return how many replicas write in its book."""
        return self.replicas if self.is_shared else 1

    def own(self, parts: list[list[int]]) -> list[list[int]]:
        """Return those of all replicas' parts that are in its book."""
        return parts if self.is_shared else [parts[self.replica]]


@dataclass(frozen=True)
class Resumed:
    """The state that a replica resumes with."""

    book: Book
    """Its own, or the same on all that share it."""
    groups: list[tuple[int, dict[str, Any]]]
    """(number in the book, plain group) of the groups that this replica finishes."""
    states: list[dict[str, Any]]
    """Saved states whose rollouts made ahead this replica takes."""


def resumed(
    states: Sequence[dict[str, Any]],
    *,
    step: int,
    share: Share,
    costs_of: Callable[[int], Sequence[float]],
) -> Resumed:
    """Return the state that a replica resumes with: each group under way goes to one replica.

    If the job has the same replicas, each takes its own groups. Otherwise groups, and prompts that
    no replica had taken, are dealt again.

    Args:
        states: of the checkpoint's replicas, in their order.
        step: of the checkpoint.
        costs_of: expected cost of each prompt of a step.
    """
    is_same = len(states) == share.replicas and all(
        state["is_shared"] == share.is_shared for state in states
    )
    if is_same and not share.is_shared:
        states = [states[share.replica]]
    groups = _in_order(states)
    opened = max(state["opened"] for state in states)
    book = Book(next=max([step, *(state["next"] for state in states)]), opened=opened)
    numbers: Sequence[int]
    if is_same:
        # Decisions after the checkpoint name groups by their numbers.
        numbers = [plain["number"] for _, plain in groups]
        book.number = states[0]["number"]
        book.complete = list(states[0]["complete"])
        book.left = {k: [list(part) for part in parts] for k, parts in states[0]["left"].items()}
    else:
        if not share.is_shared:
            groups = groups[share.replica :: share.replicas]
        numbers = range(len(groups))
        book.number = len(groups)
        left = _left(states, opened=opened, costs_of=costs_of)
        again = deal_again(left, costs_of={k: costs_of(k) for k in left}, parts=share.replicas)
        book.left = {k: own for k, parts in again.items() if any(own := share.own(parts))}
    mine = []
    for number, (replica, plain) in zip(numbers, groups, strict=True):
        book.waiting[number] = (plain["version"], plain["step"], plain["slot"])
        owner = replica if is_same else number % share.replicas
        if owner == share.replica or not share.is_shared:
            mine.append((number, plain))
    is_alone = is_same and not share.is_shared
    ahead = states if is_alone else states[share.replica :: share.replicas]
    return Resumed(book, mine, list(ahead))


def _in_order(states: Sequence[dict[str, Any]]) -> list[tuple[int, dict[str, Any]]]:
    """Return (replica, group) in the order of admission: numbers rise with versions."""
    groups = [(at, plain) for at, state in enumerate(states) for plain in state["waiting"]]
    return sorted(groups, key=lambda group: (group[1]["version"], group[1]["number"], group[0]))


def _left(
    states: Sequence[dict[str, Any]], *, opened: int, costs_of: Callable[[int], Sequence[float]]
) -> dict[int, list[int]]:
    """Return the slots of opened steps that no replica had taken. Replicas with a book each may
    have opened different steps."""
    left: dict[int, list[int]] = {}
    for replica, state in enumerate(states):
        if state["is_shared"] and replica:
            break  # the same book again
        for step, parts in state["left"].items():
            left.setdefault(step, []).extend(slot for part in parts for slot in part)
        for step in range(state["opened"], opened):
            left.setdefault(step, []).extend(deal(costs_of(step), len(states))[replica])
    return left
