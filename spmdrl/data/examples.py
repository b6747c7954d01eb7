"""Rows of the offline objectives as token ids and masks of the responses.

A row is rendered turn by turn, as it would be generated: the text up to a response, then the
response. Each longer text must begin with the shorter one, so that a response is the ids that its
turn adds, and no token crosses the border between the prompt and the response.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import torch
from transformers import PreTrainedTokenizerBase

from spmdrl.algorithms import registry
from spmdrl.algorithms.preference.unpaired import mismatched
from spmdrl.config import Config
from spmdrl.data.attachments import COLUMNS, ImageFiles
from spmdrl.data.hashed import hashed
from spmdrl.data.imitation import Example, encode_example
from spmdrl.data.prompts import TRIED_ROWS, Fit, cached_rows, make_order
from spmdrl.data.rows import Messages, Need, label_of, pair_of
from spmdrl.data.sources import in_file_order, load_rows
from spmdrl.data.teacher_prompts import TeacherPrompts
from spmdrl.errors import Refusal
from spmdrl.imports import refusing


@dataclass(frozen=True)
class Unit:
    """The sequences of one row, which train together."""

    examples: tuple[Example, ...]
    """One to imitate; (chosen, rejected); or (own, mismatched), see LabelledSource."""
    rewards: tuple[float, ...]
    """Of each sequence. The first has the margin of a pair, or the label 1 or 0; all others 0."""
    source: int = 0
    """Number of the source in data.train."""
    index: int = -1
    """Position of the row in data.train, as `Prompt.index`."""


def example_source(
    cfg: Config, tokenizer: PreTrainedTokenizerBase, *, max_positions: int | None = None
) -> ExampleSource:
    """Return the source of rows that an offline objective trains on.

    Args:
        max_positions: tokens that a sequence may have in the model; None for any number.
    Raises: Refusal for data that cannot be used; see the sources.
    """
    sources = {"example": SupervisedSource, "pair": PairSource, "label": LabelledSource}
    return sources[row_kind(cfg)](cfg, tokenizer, max_positions=max_positions)


def row_kind(cfg: Config) -> Need:
    """Return what a row of data.train must hold. Some losses on pairs take one labelled response.

    Raises: Refusal for an unknown loss on pairs.
    """
    objective = cfg.objective
    if objective.row == "pair" and registry.is_unpaired(
        registry.get(objective.loss_kind, cfg.algorithm.loss)
    ):
        return "label"
    return objective.row


class ExampleSource:
    """Units of each step, a function of (seed, step).

    Raises (on construction): Refusal for unreadable or empty data, and naming file and line of a
        row that lacks a column, that the chat template cannot render, or that has a sequence above
        `limit` under overlong_prompts=error.
    """

    need: Need
    """What a row must hold."""

    def __init__(
        self, cfg: Config, tokenizer: PreTrainedTokenizerBase, *, max_positions: int | None = None
    ):
        self.cfg = cfg
        self.tokenizer = tokenizer
        self.rows = load_rows(cfg, split="train", need=self.need)
        if cfg.hints_teacher:
            TeacherPrompts(cfg, tokenizer, self.rows).check(tried=TRIED_ROWS)
        self._fit = Fit(*self.limit(), cfg.data.overlong_prompts)
        if max_positions is not None and max_positions < self._fit.limit:
            self._fit = replace(
                self._fit,
                limit=max_positions,
                field="the model's max_position_embeddings",
                can_be_raised=False,
            )
        self._unit = functools.lru_cache(maxsize=cached_rows(self.rows, tokenizer))(self._encode)
        self._kept = self._fit.usable(self.rows, measure=lambda i: _longest(self._unit(i)))
        self.num_dropped = len(self.rows) - len(self._kept)
        self.order = make_order(cfg, self._kept)

    def limit(self) -> tuple[int, str]:
        """Return the longest sequence allowed, in tokens, and the fields that set it."""
        longest = self.cfg.longest_sequence
        return longest, "data.max_prompt_tokens + sampling.max_response_tokens"

    def units_at(self, step: int) -> list[Unit]:
        """Return the units of `step`, the same on every rank."""
        return in_file_order(self.unit, [self._kept[i] for i in self.order.at(step)])

    def rows_of_run(self) -> list[int]:
        """Return the rows that the run's steps take, ascending: all, unless the run ends before."""
        places: set[int] = set()
        steps = 0
        while len(places) < self.order.num_rows and steps < self.cfg.steps:
            places.update(self.order.at(steps))
            steps += 1
        return [self._kept[i] for i in sorted(places)]

    def unit(self, index: int) -> Unit:
        """Return a row's sequences. Raises: Refusal, as on construction."""
        unit = self._unit(index)
        self._fit.check(self.rows, index, length=_longest(unit))
        return replace(unit, source=self.rows.source(index), index=index)

    def _encode(self, index: int) -> Unit:
        raise NotImplementedError

    def _example(self, index: int, row: dict) -> Example:
        return encode_example(
            row,
            self.tokenizer,
            template=self.cfg.data.chat_template,
            where=self.rows.where(index),
            files=ImageFiles(self.cfg.data.images, self.rows.folder(index)),
        )


class SupervisedSource(ExampleSource):
    """Supervised rows, each a unit of one sequence of at most tokens_per_microbatch tokens."""

    need: Need = "example"

    def limit(self) -> tuple[int, str]:
        """Return the smaller of the limit of all objectives and the budget of a micro-batch."""
        longest = super().limit()
        budget = self.cfg.batch.tokens_per_microbatch or longest[0]
        return min(longest, (budget, "batch.tokens_per_microbatch"))

    def _encode(self, index: int) -> Unit:
        return Unit((self._example(index, self.rows[index]),), (0.0,))


class PairSource(ExampleSource):
    """Pairs of responses to compare: units of (chosen, rejected); see `rows.pair_of`."""

    need: Need = "pair"

    def _encode(self, index: int) -> Unit:
        row = self.rows[index]
        prompt, chosen, rejected, margin = pair_of(row, place=self.rows.where(index))
        sides = tuple(self._reply(index, prompt, side) for side in (chosen, rejected))
        return Unit(sides, (margin, 0.0))

    def _reply(self, index: int, prompt: str | Messages, response: str | Messages) -> Example:
        row = self.rows[index]
        held = {name: row.get(name) for name in ("tools", *COLUMNS)}
        return self._example(index, held | {"prompt": prompt, "completion": response})


class LabelledSource(PairSource):
    """Single responses marked good or bad, each with a response to another prompt.

    A unit is the row's own sequence, whose reward is the label, and its prompt with the response of
    another row of the step, for KTO's KL. That response is cut so that the sequence is not too
    long.

    Raises (on construction): Refusal as ExampleSource; see `rows.label_of`.
    """

    need = "label"

    def units_at(self, step: int) -> list[Unit]:
        """Return the rows of `step`, (own, mismatched), the same on every rank.

        Raises: Refusal when all rows of the step have one prompt.
        """
        own = super().units_at(step)
        cut = [_split(unit.examples[0]) for unit in own]
        prompts = [_identity(context) for context, _ in cut]
        with refusing(f"data.train, step {step}", Refusal):
            others = mismatched(torch.tensor(prompts))
        units = []
        for unit, (context, _), other in zip(own, cut, others.tolist()):
            reply = cut[other][1].part(0, self._fit.limit - len(context.tokens))
            both = (*unit.examples, context.followed_by(reply))
            units.append(replace(unit, examples=both, rewards=(*unit.rewards, 0.0)))
        return units

    def _encode(self, index: int) -> Unit:
        row = self.rows[index]
        label = label_of(row, place=self.rows.where(index))
        return Unit((self._reply(index, row["prompt"], row["completion"]),), (float(label),))


def _longest(unit: Unit) -> int:
    return max(len(example.tokens) for example in unit.examples)


def _identity(context: Example) -> int:
    """Return a digest of a prompt's tokens and images."""
    keys = [item.key for item in context.tokens.items]
    # 63 bits, since `mismatched` takes int64.
    return hashed(repr(([*context.tokens], keys))) >> 1


def _split(example: Example) -> tuple[Example, Example]:
    """Return the tokens before the first response token, and the rest."""
    first = example.mask.index(True)
    return example.part(0, first), example.part(first, len(example.tokens))
