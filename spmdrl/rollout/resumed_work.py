"""Save unfinished groups in a checkpoint, restore them, and deal them to the job's replicas."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from spmdrl.environments.plain_state import PLAIN
from spmdrl.errors import Refusal
from spmdrl.plain import pack
from spmdrl.rollout.balance import deal, deal_again
from spmdrl.rollout.book import Book
from spmdrl.rollout.episode import Draw, Episode, FinishedEpisode, Group
from spmdrl.rollout.trajectory import Trajectory
from spmdrl.rollout.tree import Tree
from spmdrl.types import Prompt
from spmdrl.workers.pool import RewardResult


def group_to_dict(group: Group, unfinished: Sequence[Episode]) -> dict[str, Any]:
    """Return a group as dictionaries, tensors and numbers, with a digest of its row in place of
    the prompt.

    Args:
        unfinished: episodes of this group and of others, with the tokens drawn so far.
    """
    return {
        "step": group.step,
        "slot": group.slot,
        "row": row_digest(group.prompt),
        "version": group.version,
        "samples": [
            {
                "sample": s.sample,
                "prompt": s.prompt.text,
                "traces": [trace.state_dict() for trace in s.traces],
                "text": s.text,
                "reward": asdict(s.reward),
            }
            for s in group.samples.values()
        ],
        "episodes": [_episode_to_dict(e) for e in unfinished if e.group is group],
    }


def _episode_to_dict(episode: Episode) -> dict[str, Any]:
    plain = {f.name: getattr(episode, f.name) for f in fields(episode) if f.name != "group"}
    # The environment as text: torch.load with weights_only does not load bytes.
    return plain | {
        "trajectory": episode.trajectory.state_dict(),
        "environment": episode.environment.decode("latin-1"),
        "tree": None if episode.tree is None else episode.tree.state_dict(),
    }


def row_digest(prompt: Prompt) -> str:
    """Return the first 16 digits of a sha256 of a prompt's row and the index of its source."""
    return hashlib.sha256(pack([prompt.source, prompt.row])).hexdigest()[:16]


def without_work(states: Sequence[dict[str, Any]], *, step: int) -> list[dict[str, Any]]:
    """Return saved states as if no replica had begun `step` or a later one."""
    nothing: dict[str, Any] = {"ahead": {}, "number": 0, "complete": [], "left": {}, "waiting": []}
    return [state | nothing | {"next": step, "opened": step} for state in states]


def check_environments(states: Sequence[dict[str, Any]], *, trusts_pickles: bool) -> None:
    """Refuse environments that a checkpoint holds as pickles, which run code when they are loaded.

    Args:
        states: the states that the checkpoint has of all replicas.
    Raises: Refusal that says how to allow them.
    """
    environments = []
    for state in states:
        for group in state["waiting"]:
            environments += [e["environment"] for e in group["episodes"] if e["environment"]]
    pickled = [text for text in environments if not text.startswith(PLAIN.decode())]
    if pickled and not trusts_pickles:
        raise Refusal(
            f"the checkpoint's rollouts_*.pt hold {len(pickled)} of {len(environments)} unfinished "
            "environments as pickles, which can run any code. If you trust the writer of the "
            "checkpoint, resume with --checkpoint.trust-pickles true; environments of plain "
            "attributes, or with `save` and `restore`, need no pickles (docs/environments.md)"
        )


def group_from_dict(
    plain: dict[str, Any], *, number: int, draw: Draw, prompt: Prompt
) -> tuple[Group, list[Episode]]:
    """Return a group and its unfinished episodes, from the result of `group_to_dict`."""
    group = Group(number, plain["step"], plain["slot"], prompt, plain["version"], draw)
    for s in plain["samples"]:
        traces = tuple(map(Trajectory.from_state_dict, s["traces"]))
        group.samples[s["sample"]] = FinishedEpisode(
            group.slot,
            s["sample"],
            traces[0].update_prompt(prompt, text=s["prompt"]),
            traces,
            s["text"],
            RewardResult(**s["reward"]),
        )
    episodes = []
    for e in plain["episodes"]:
        decoded = {
            "trajectory": Trajectory.from_state_dict(e["trajectory"]),
            "environment": e["environment"].encode("latin-1"),
            "info": dict(e["info"]),
            "tree": None if e["tree"] is None else Tree.from_state_dict(e["tree"]),
        }
        episodes.append(Episode(group, **e | decoded))
    return group, episodes


# --------------------------------------------------------------------------- deal to replicas


@dataclass(frozen=True)
class Share:
    """A replica's share of the prompts."""

    replica: int
    replicas: int
    is_shared: bool
    """Whether all replicas share one book."""

    @property
    def part(self) -> int:
        """Return the index of the replica's part in its book."""
        return self.replica if self.is_shared else 0

    @property
    def num_writers(self) -> int:
        """Return how many replicas write into its book."""
        return self.replicas if self.is_shared else 1

    def select(self, parts: list[list[int]]) -> list[list[int]]:
        """Return the parts that are in its book, of the parts of all replicas."""
        return parts if self.is_shared else [parts[self.replica]]


@dataclass(frozen=True)
class ResumeState:
    """The state that a replica resumes with."""

    book: Book
    """The replica's own book, or the same book on all replicas."""
    groups: list[tuple[int, dict[str, Any]]]
    """(number in the book, result of `group_to_dict`) of each group that this replica finishes."""
    states: list[dict[str, Any]]
    """Saved states whose shares of later steps this replica takes."""


def resume_state(
    states: Sequence[dict[str, Any]],
    *,
    step: int,
    share: Share,
    costs_of: Callable[[int], Sequence[float]],
) -> ResumeState:
    """Return the state that a replica resumes with. Each unfinished group goes to one replica.

    If the job has the same replicas as before, each takes its own groups. Otherwise the groups are
    dealt again, and so are the prompts that no replica had taken.

    Args:
        states: the states of the checkpoint's replicas, in order.
        step: step of the checkpoint.
        costs_of: returns the expected cost of each prompt of a step.
    """
    is_same = len(states) == share.replicas and all(
        state["is_shared"] == share.is_shared for state in states
    )
    if is_same and not share.is_shared:
        states = [states[share.replica]]
    groups = _groups_in_order(states)
    opened = max(state["opened"] for state in states)
    book = Book(next=max([step, *(state["next"] for state in states)]), opened=opened)
    numbers: Sequence[int]
    if is_same:
        # Keep the numbers: decisions after the checkpoint name groups by them.
        numbers = [plain["number"] for _, plain in groups]
        book.number = states[0]["number"]
        book.complete = list(states[0]["complete"])
        book.left = {k: [list(part) for part in parts] for k, parts in states[0]["left"].items()}
    else:
        if not share.is_shared:
            groups = groups[share.replica :: share.replicas]
        numbers = range(len(groups))
        book.number = len(groups)
        left = _remaining_slots(states, opened=opened, costs_of=costs_of)
        again = deal_again(left, costs_of={k: costs_of(k) for k in left}, parts=share.replicas)
        book.left = {k: own for k, parts in again.items() if any(own := share.select(parts))}
    own_groups = []
    for number, (replica, plain) in zip(numbers, groups, strict=True):
        book.waiting[number] = (plain["version"], plain["step"], plain["slot"])
        owner = replica if is_same else number % share.replicas
        if owner == share.replica or not share.is_shared:
            own_groups.append((number, plain))
    if not is_same or share.is_shared:
        states = states[share.replica :: share.replicas]
    return ResumeState(book, own_groups, list(states))


def _groups_in_order(states: Sequence[dict[str, Any]]) -> list[tuple[int, dict[str, Any]]]:
    """Return (index of the replica, plain group) of all groups, in the order of admission."""
    groups = [(at, plain) for at, state in enumerate(states) for plain in state["waiting"]]
    return sorted(groups, key=lambda group: (group[1]["version"], group[1]["number"], group[0]))


def _remaining_slots(
    states: Sequence[dict[str, Any]], *, opened: int, costs_of: Callable[[int], Sequence[float]]
) -> dict[int, list[int]]:
    """Return {step: slots that no replica had taken} of all steps that any replica has opened.

    Replicas with books of their own may have opened different steps.
    """
    left: dict[int, list[int]] = {}
    for replica, state in enumerate(states):
        if state["is_shared"] and replica:
            break  # all states have the same book
        for step, parts in state["left"].items():
            left.setdefault(step, []).extend(slot for part in parts for slot in part)
        for step in range(state["opened"], opened):
            left.setdefault(step, []).extend(deal(costs_of(step), len(states))[replica])
    return left
