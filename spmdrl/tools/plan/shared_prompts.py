"""How the sequences of a group compute their prompt together: once in each micro-batch.

Sequences have the mean lengths of the run. A group is divided evenly, as data/microbatch_plan.py
does where all groups are alike.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from spmdrl.config.fields import sequences_together
from spmdrl.data.microbatch_plan import room_of
from spmdrl.data.prefix_tree import LEAST, surely_of
from spmdrl.model.attention.packing import PaddedGroup
from spmdrl.tools.plan.activations import shared_groups
from spmdrl.tools.plan.run import Run
from spmdrl.world.axes import Axes


@dataclass(frozen=True)
class PromptGroup:
    """How a group is spread over micro-batches. If nothing is shared, it is one sequence."""

    prompt: float  # tokens
    response: float  # tokens
    size: int  # sequences
    pieces: int = 1  # parts of the group, each in one micro-batch, which computes the prompt once

    @property
    def computed_tokens(self) -> float:
        """Tokens that are computed."""
        return self.pieces * self.prompt + self.size * self.response

    @property
    def planned_tokens(self) -> float:
        """Tokens that the group takes of the budgets of micro-batches."""
        others = self.size - self.pieces
        return self.pieces * (self.prompt + self.response) + others * self._of_another

    @property
    def copied_keys(self) -> float:
        """Keys that attention copies: those of the prompt, for each response that shares them."""
        return self.size * self.prompt if self.pieces < self.size else 0.0

    @property
    def lengths(self) -> Tensor:
        """Tokens of each sequence: [size] int64."""
        return torch.full((self.size,), int(self.prompt + self.response))

    @property
    def before(self) -> Tensor:
        """How many tokens of each sequence another one has computed: [size] int64."""
        before = torch.full((self.size,), int(self.prompt))
        before[: self.pieces] = 0
        return before

    def padded(self, count: float) -> tuple[PaddedGroup, ...]:
        """Return how padded attention groups the sequences of `count` such groups in a row."""
        pieces = count * self.pieces
        each = shared_groups(
            int(self.prompt), max(1, int(self.response)), count=-(-self.size // self.pieces)
        )
        return tuple(replace(own, count=max(1, round(pieces * own.count))) for own in each)

    @property
    def _of_another(self) -> float:
        """Tokens that each sequence after the first of a piece takes of the budget."""
        return room_of(self.prompt + self.response, surely_of(self.prompt))

    def fitting(self, tokens: int) -> int:
        """Return how many sequences a micro-batch of this budget holds, at least 1."""
        room = tokens - self.prompt - self.response
        return 1 + max(0, int(room // self._of_another))


def group_of(run: Run, axes: Axes, *, tokens: int) -> PromptGroup:
    """Return how a layout computes a group.

    Args:
        tokens: budget of a micro-batch.
    """
    size = run.cfg.sequences_per_row
    if not run.shares_prefixes or size == 1 or run.prompt_tokens < LEAST:
        return PromptGroup(run.prompt_tokens, run.response_tokens, size=1)
    group = PromptGroup(run.prompt_tokens, run.response_tokens, size)
    if sequences_together(run.cfg) > 1:
        return group
    # Ranks that have fewer sequences than a group get parts of one.
    of_rank = -(-run.sequences // (axes.dp_size * run.cfg.batch.updates_per_step))
    most = min(size, group.fitting(tokens), of_rank)
    return PromptGroup(run.prompt_tokens, run.response_tokens, size, pieces=-(-size // most))
