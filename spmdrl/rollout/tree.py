"""The tokens of an agent's episode as a tree.

Each request of the agent is a call. A call reads the path of an earlier node, or of none, and then
ids of its own. It has a node for each sample that the policy draws after them. So a node is never
continued in its middle, and what several calls read is held once.

A leaf and all that it read is a trace. A sampled token is trained on in the first trace that holds
it; in later traces it is context.

An agent that begins again makes its calls again. A call that equals an earlier one gets the answer
of that one (`claim`). What no call claims is in no trace.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from spmdrl.agents.messages import NO_PARENT, Ask
from spmdrl.columns import Columns, column_class, concat_columns
from spmdrl.data.hashed import hashed
from spmdrl.engine.protocol import Completion
from spmdrl.rollout.trajectory import Trajectory, drawn_tokens
from spmdrl.types import Tokens, token_fields_from

_UNCLAIMED = -1


@dataclass(frozen=True)
class Node:
    """One sample of a call."""

    call: int
    """Index of its call."""
    sampled: Tokens
    """Drawn so far."""
    prompt_columns: Columns
    """Those columns that cover prompts. They begin where those of the parent's path end."""
    is_complete: bool = False
    is_truncated: bool = False
    """Whether it was cut at its call's max_tokens."""


@dataclass
class AgentCall:
    """A request of the agent."""

    ask: Ask
    digest: str
    """Of all that decides on the answers; see `_digest`."""
    seed: int
    """From which the seeds of its nodes are made, 63 bits."""
    room: int
    """Most tokens that the run allows for each sample."""
    nodes: range
    id: int
    """Number of the request in the agent's latest run; -1 if it has not come again."""

    @property
    def max_tokens(self) -> int:
        """Return the most tokens of each sample."""
        return min(self.room, self.ask.max_tokens)

    def seed_of(self, node: int) -> int:
        """Return the 63-bit seed of one of its nodes."""
        return hashed(f"{self.seed}, sample {node - self.nodes.start}") >> 1

    @property
    def is_claimed(self) -> bool:
        """Return whether the agent's latest run has made this request."""
        return self.id != _UNCLAIMED


class Tree:
    """The calls and the nodes of an episode, both numbered in the order of the requests.

    Args:
        seed: of the sample; the seeds of calls are made from it.
    """

    def __init__(self, seed: int):
        self.seed = seed
        self.calls: list[AgentCall] = []
        self.nodes: list[Node] = []
        self.is_closed = False
        """Whether the agent has ended, so that unfinished nodes are not needed."""

    # ---------------------------------------------------------------- paths

    def read_by(self, ask: Ask) -> tuple[list[int], int]:
        """Return the ids that a request reads, and how many of them the policy sampled.

        Raises: ValueError for a parent that the agent has no answer of.
        """
        if ask.parent == NO_PARENT:
            return [*ask.tokens], 0
        if not 0 <= ask.parent < len(self.nodes) or not self._is_answered(ask.parent):
            raise ValueError(
                f"request {ask.id} of {ask.episode} continues node {ask.parent}, which is not "
                f"among the answers to its agent"
            )
        path = self.path(ask.parent)
        return [*path.tokens.tolist(), *ask.tokens], path.num_sampled

    def path(self, number: int, *, context: Collection[int] = ()) -> Trajectory:
        """Return a node with all that it read.

        Args:
            context: nodes whose tokens are not in the response_mask.
        """
        numbers = [*self._ancestors(number)][::-1]
        pieces = []
        for own in numbers:
            node = self.nodes[own]
            pieces.append(Tokens.unsampled(self.calls[node.call].ask.tokens))
            is_context = own in context
            ids = node.sampled.tokens.tolist() if is_context else []
            pieces.append(Tokens.unsampled(ids) if is_context else node.sampled)
        joined = Tokens.concat(pieces)
        covering = self._prompt_columns(numbers)
        turns = sum(own not in context for own in numbers)
        last = self.nodes[number]
        first = self.calls[self.nodes[numbers[0]].call]
        return Trajectory(
            **joined.token_fields() | {"extra_columns": {**joined.extra_columns, **covering}},
            num_prompt_tokens=len(first.ask.tokens),
            is_truncated=last.is_truncated
            and len(last.sampled.tokens) == self.calls[last.call].room,
            states=(-1,) * turns,
            earned=(0.0,) * turns,
        )

    def _ancestors(self, number: int) -> Iterator[int]:
        """Yield a node, its parent, and so on up to a node without one."""
        while number != NO_PARENT:
            yield number
            number = self.calls[self.nodes[number].call].ask.parent

    def _prompt_columns(self, numbers: Sequence[int]) -> Columns:
        """Return the columns that cover prompts, of a path's tokens up to the last known one."""
        columns = [self.nodes[number].prompt_columns for number in numbers]
        lengths = [max(map(len, own.values()), default=0) for own in columns]
        return concat_columns(columns, lengths)

    # ---------------------------------------------------------------- calls

    def add(self, ask: Ask, *, room: int) -> AgentCall:
        """Add a call, with a node without tokens for each sample.

        Args:
            room: most tokens that the run allows for each sample.
        """
        digest = self._digest(ask)
        earlier = sum(call.digest == digest for call in self.calls)
        seed = hashed(f"{self.seed}/{digest}/{earlier}") >> 1
        first = len(self.nodes)
        nodes = range(first, first + ask.samples)
        call = AgentCall(ask, digest, seed, room, nodes, ask.id)
        none = Tokens.unsampled([])
        self.nodes += [Node(len(self.calls), none, {}) for _ in nodes]
        self.calls.append(call)
        return call

    def claim(self, ask: Ask) -> AgentCall | None:
        """Return the first unclaimed call that equals a request, now claimed by it; None without
        one."""
        if all(call.is_claimed for call in self.calls):
            return None
        digest = self._digest(ask)
        for call in self.calls:
            if not call.is_claimed and call.digest == digest:
                call.id = ask.id
                return call
        return None

    def unclaim(self) -> None:
        """Note that the agent begins again: it has made no request yet."""
        for call in self.calls:
            call.id = _UNCLAIMED

    def _digest(self, ask: Ask) -> str:
        """Return a digest of what decides on the answers to a request: the ids that it reads,
        samples, max_tokens, stop."""
        ids, _ = self.read_by(ask)
        text = repr((ids, ask.samples, ask.max_tokens, ask.stop))
        return f"{hashed(text, num_bytes=16):032x}"

    def is_complete(self, call: AgentCall) -> bool:
        """Return whether all samples of a call are complete."""
        return all(self.nodes[number].is_complete for number in call.nodes)

    def _is_answered(self, number: int) -> bool:
        """Return whether a node is part of an answer that the agent has."""
        call = self.calls[self.nodes[number].call]
        return call.is_claimed and self.is_complete(call)

    # ---------------------------------------------------------------- samples

    def draw(self, number: int, completion: Completion, *, is_complete: bool) -> None:
        """Append to a node what the engine drew.

        Args:
            completion: of a request whose prompt is the node's path.
            is_complete: whether this ends the sample.
        """
        node = self.nodes[number]
        known = self._prompt_columns([*self._ancestors(number)][::-1])
        covering = dict(node.prompt_columns)
        for key, column in completion.extra_columns.items():
            if column.covers_prompt:
                # The first report of a token counts: it was drawn with that one.
                begin = len(known[key]) if key in known else 0
                rest = column[torch.arange(begin, len(column))]
                covering[key] = rest.cat([covering[key], rest]) if key in covering else rest
        self.nodes[number] = replace(
            node,
            sampled=Tokens.concat([node.sampled, drawn_tokens(completion)]),
            prompt_columns=covering,
            is_complete=is_complete,
            is_truncated=completion.is_truncated,
        )

    def with_drawn(self, completions: Mapping[int, Completion]) -> Tree:
        """Return a copy in which unfinished nodes have these tokens too, by node."""
        copied = Tree(self.seed)
        copied.calls = [replace(call) for call in self.calls]
        copied.nodes = list(self.nodes)
        for number, completion in completions.items():
            copied.draw(number, completion, is_complete=False)
        return copied

    @property
    def unfinished(self) -> list[int]:
        """Return the nodes that the engine must still draw tokens for."""
        return [number for number, node in enumerate(self.nodes) if not node.is_complete]

    @property
    def num_asked(self) -> int:
        """Return how many samples the agent's latest run has asked for."""
        return sum(call.ask.samples for call in self.calls if call.is_claimed)

    # ---------------------------------------------------------------- traces

    @property
    def answered(self) -> list[int]:
        """Return the nodes that the agent has got as answers."""
        return [number for number in range(len(self.nodes)) if self._is_answered(number)]

    def traces(self) -> tuple[Trajectory, ...]:
        """Return the trace of each leaf among the answered nodes, in the order of the leaves."""
        answered = self.answered
        parents = {self.calls[self.nodes[number].call].ask.parent for number in answered}
        traces = []
        taken: set[int] = set()
        for leaf in answered:
            if leaf not in parents:
                traces.append(self.path(leaf, context=taken))
                taken.update(self._ancestors(leaf))
        return tuple(traces)

    # ---------------------------------------------------------------- checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Return the tree as dictionaries, tensors and numbers."""
        return {
            "seed": self.seed,
            "calls": [_call_to_dict(call) for call in self.calls],
            "nodes": [_node_to_dict(node) for node in self.nodes],
        }

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any]) -> Tree:
        """Return the tree from the result of its `state_dict`."""
        tree = Tree(state["seed"])
        tree.calls = [_call_from_dict(own) for own in state["calls"]]
        tree.nodes = [_node_from_dict(own) for own in state["nodes"]]
        return tree


def _call_to_dict(call: AgentCall) -> dict[str, Any]:
    return vars(call) | {"ask": asdict(call.ask), "nodes": (call.nodes.start, call.nodes.stop)}


def _call_from_dict(state: Mapping[str, Any]) -> AgentCall:
    return AgentCall(**{**state, "ask": Ask(**state["ask"]), "nodes": range(*state["nodes"])})


def _node_to_dict(node: Node) -> dict[str, Any]:
    columns = {key: column.state_dict() for key, column in node.prompt_columns.items()}
    return vars(node) | {"sampled": node.sampled.state_dict(), "prompt_columns": columns}


def _node_from_dict(state: Mapping[str, Any]) -> Node:
    columns = {
        key: column_class(key).from_state_dict(own) for key, own in state["prompt_columns"].items()
    }
    sampled = Tokens(**token_fields_from(state["sampled"]))
    return Node(**{**state, "sampled": sampled, "prompt_columns": columns})
