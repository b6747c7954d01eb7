"""What teachers read of a micro-batch: the sequences of their rows, perhaps after another prompt.

Shape letters: N scored tokens of the policy's row, n of those in this rank's slice of it, K scored
tokens of a teacher's row, k of those among the n.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from spmdrl.columns import RouterRoutes, to_device
from spmdrl.config import Config
from spmdrl.data.examples import row_kind
from spmdrl.data.sources import load_rows
from spmdrl.data.teacher_prompts import TeacherPrompts
from spmdrl.data.tokenizer import load_tokenizer
from spmdrl.errors import Refusal
from spmdrl.model.sampling_rules import SamplingRules, make_sampling_mask
from spmdrl.model.scorer import ScoredRow
from spmdrl.model.sharded_model import ShardedModel
from spmdrl.sampling_masks import SamplingMasks
from spmdrl.types import Microbatch, Scalars, Tokens


@dataclass(frozen=True)
class Places:
    """Where the scored tokens of a teacher's row are among those of the policy's row."""

    order: Tensor  # [K] int64, which of the N each is, ascending
    picked: Tensor  # [k] int64, which of the K are in this rank's slice of the policy's row
    at: Tensor  # [k] int64, which of the slice's n these are


@dataclass(frozen=True)
class Lesson:
    """What one teacher reads of a micro-batch."""

    row: ScoredRow
    """One token that is not scored where the teacher has no sequence."""
    places: Places | None
    """None: the teacher reads the policy's own row."""
    rules: SamplingRules | None
    """How the k scored tokens were sampled."""


class Lessons:
    """Makes what teachers read, on a trainer rank.

    Args:
        policy: whose rows they are.
        num_ids: of each of Config.teachers, the ids that it embeds.
    Raises: Refusal when rows or the tokenizer are needed and cannot be read.
    """

    def __init__(self, cfg: Config, *, policy: ShardedModel, num_ids: Sequence[int]):
        self.cfg = cfg
        self._policy = policy
        self._num_ids = num_ids
        self._has_penalties = cfg.objective.samples and cfg.sampling.penalties.is_on
        self._num_teachers = len(cfg.teachers)
        self._is_plain = self._num_teachers == 1 and not cfg.hints_teacher
        if self._is_plain:
            return
        self._rows = load_rows(cfg, split="train", need=row_kind(cfg))
        self._prompts = TeacherPrompts(cfg, load_tokenizer(cfg), self._rows)
        numbers = {teacher: number for number, teacher in enumerate(cfg.teachers)}
        self._teachers = [numbers[cfg.teacher_of(one)] for one in cfg.data.sources("train")]

    def of(
        self, host: Microbatch, scalars: Scalars, *, loss_mask: Tensor, row: ScoredRow
    ) -> tuple[Lesson, ...]:
        """Return what each teacher reads of a micro-batch, in the order of Config.teachers.

        Args:
            host: the micro-batch on the CPU.
            scalars: of the whole batch.
            loss_mask: [T] bool on the CPU.
            row: the policy's row of it.
        Raises: Refusal for an id that a teacher does not embed, and for a row of data.train without
            what a teacher reads.
        """
        if self._is_plain:
            self._check_ids(host.tokens, 0)
            # Replayed routes are the policy's, and a teacher routes tokens itself.
            return (Lesson(row.without_routes(), None, row.own.rules),)
        indices = self._indices(host, scalars)
        numbers = range(self._num_teachers)
        return tuple(self._lesson(n, host, indices, loss_mask=loss_mask, row=row) for n in numbers)

    def _indices(self, host: Microbatch, scalars: Scalars) -> list[int]:
        """Return which row of data.train each sequence answers; -1 for a dummy."""
        ids = host.sequence_ids
        found = torch.where(ids < 0, -1, scalars.rows[ids])
        if bool((found[ids >= 0] < 0).any()):
            raise Refusal(
                "data.train: several teachers, or data.teacher_prompt, need the rows that "
                "sequences answer, and these sequences name none; sample them again"
            )
        return found.tolist()

    def _lesson(
        self,
        number: int,
        host: Microbatch,
        indices: list[int],
        *,
        loss_mask: Tensor,
        row: ScoredRow,
    ) -> Lesson:
        parts: list[Tokens] = []
        masks: list[Tensor] = []
        lengths: list[int] = []
        is_read = torch.zeros_like(loss_mask)
        bounds = host.cu_seqlens.tolist()
        for index, begin, end in zip(indices, bounds, bounds[1:]):
            if index < 0 or self._teachers[self._rows.source(index)] != number:
                continue
            is_read[begin:end] = True
            first = begin
            count = 0
            prompt = self._prompts.tokens(index)
            if prompt is not None:
                first += _prompt_length(host.response_mask[begin:end])
                count = len(prompt)
                parts.append(Tokens.unsampled(prompt))
                masks.append(loss_mask.new_zeros(count))
            parts.append(host.at(torch.arange(first, end)))
            masks.append(loss_mask[first:end])
            lengths.append(count + end - first)
        if not parts:
            # Every rank runs every teacher, since their weights are gathered from all ranks.
            parts = [Tokens.unsampled([0])]
            masks = [loss_mask.new_zeros(1)]
            lengths = [1]
        read = Tokens.concat(parts)
        self._check_ids(read.tokens, number)
        columns = {k: own for k, own in read.extra_columns.items() if k != RouterRoutes.key}
        taught = self._policy.row(
            read.tokens,
            lengths,
            mask=torch.cat(masks),
            columns=columns,
            drawn=read.response_mask if self._has_penalties else None,
        )
        scored = loss_mask.nonzero()[:, 0]
        places = self._places(is_read[scored], row)
        rules = self._rules(host, scored, places=places, row=row)
        return Lesson(taught, places, rules)

    def _check_ids(self, tokens: Tensor, number: int) -> None:
        """Raise Refusal for an id of the policy's padding that was sampled, beyond the teacher's
        vocabulary."""
        highest = int(tokens.max())
        if highest >= self._num_ids[number]:
            raise Refusal(
                f"a sequence holds the id {highest}, which the teacher {self.cfg.teachers[number]} "
                f"({self._num_ids[number]} rows of the vocabulary) does not embed: it is no token "
                "of the tokenizer, and the policy sampled it; set sampling.top_p, e.g. to 0.9999, "
                "which leaves such ids out, or take a teacher with as many rows as the policy"
            )

    def _places(self, is_read: Tensor, row: ScoredRow) -> Places:
        """Return where a teacher's tokens are.

        Args:
            is_read: [N] bool on the CPU, scored tokens of the policy's row that the teacher reads.
        """
        order = is_read.nonzero()[:, 0]
        numbers = torch.full((len(is_read),), -1)
        numbers = numbers.index_copy(0, order, torch.arange(len(order)))[_of_slice(row)]
        at = (numbers >= 0).nonzero()[:, 0]
        device = self._policy.world.device
        return Places(*(to_device(own, device) for own in (order, numbers[at], at)))

    def _rules(
        self, host: Microbatch, scored: Tensor, *, places: Places, row: ScoredRow
    ) -> SamplingRules | None:
        masks = SamplingMasks.of(host.extra_columns)
        if masks is None:
            return None
        own = masks[scored[_of_slice(row)[places.at.cpu()]]]
        return SamplingRules(make_sampling_mask(own, self._policy.world.device))


def _of_slice(row: ScoredRow) -> Tensor:
    """Return which of a row's N scored tokens are in this rank's slice, [n] int64 on the CPU."""
    return row.own.scored.cpu() if row.own.group is not None else torch.arange(len(row.scored))


def _prompt_length(is_sampled: Tensor) -> int:
    """Return how many tokens of a sequence [n] come before the first that was sampled."""
    found = is_sampled.nonzero()
    return int(found[0]) if len(found) else len(is_sampled)
