"""Prompts of each step, a pure function of (seed, step), so that ranks need not communicate."""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from spmdrl.config import Config
from spmdrl.data.attachments import ImageFiles, may_hold_images, reads_images, row_images
from spmdrl.data.prompt_order import Order, RowOrder, WeightedOrder
from spmdrl.data.row_sampling import row_sampling
from spmdrl.data.rows import prompt_of
from spmdrl.data.sources import Chain, SourcesRows, in_file_order, load_rows
from spmdrl.data.teacher_prompts import TeacherPrompts
from spmdrl.data.templates import encode_prompt
from spmdrl.errors import Refusal
from spmdrl.model_inputs import TokenIds
from spmdrl.types import Prompt
from spmdrl.world.launch import known_rank

# Rows of a source that are always tokenised at start. The other rows of a generated task are like
# these; the other rows of a file on disk are checked when a step takes them.
TRIED_ROWS = 256
_CACHED_WITH_IMAGES = 64
_BAR_AFTER_S = 2.0  # of measuring rows


@dataclass(frozen=True)
class Fit:
    """How long a row may be, and what happens to a longer one."""

    limit: int
    """Tokens."""
    field: str
    """The config field with the limit, for messages."""
    overlong: str
    """`error` or `drop`."""
    can_be_raised: bool = True
    """Whether a user sets `field`."""

    def check(self, rows: SourcesRows, index: int, *, length: int) -> None:
        """Raise Refusal naming the row if its `length`, in tokens, is above the limit."""
        if length > self.limit:
            raise Refusal(
                f"{rows.where(index)}: {length} tokens, above {self.field} = {self.limit}; "
                f"{'raise it, ' if self.can_be_raised else ''}shorten the row, or set "
                "data.overlong_prompts=drop"
            )

    def usable(self, rows: SourcesRows, *, measure: Callable[[int], int]) -> Chain:
        """Find the rows that fit.

        Args:
            measure: returns the length of a row in tokens.
        Returns: indices of the rows to use, source by source. After the first 256 rows of a
            source, rows are not tokenised if their bytes are few enough, so that a large file
            opens quickly.
        Raises: Refusal naming the first row that is too long, or a source with no row left.
        """
        parts = range(len(rows.parts))
        return Chain([self._usable_of(rows, part, measure=measure) for part in parts])

    def _usable_of(
        self, rows: SourcesRows, part: int, *, measure: Callable[[int], int]
    ) -> Sequence[int]:
        own = rows.indices(part)
        is_sampled = not rows.parts[part].is_held and self.overlong == "error"
        scanned = own[:TRIED_ROWS] if is_sampled else own
        kept = []
        for i in _with_bar(scanned, what=rows.where(own.start)):
            is_tried = i - own.start < TRIED_ROWS
            length = measure(i) if is_tried or self._must_measure(rows[i]) else 0
            if self.overlong == "error":
                self.check(rows, i, length=length)
            if length <= self.limit:
                kept.append(i)
        if not kept:
            raise Refusal(
                f"{rows.where(own.start)} and all {len(own)} rows are longer than {self.field} = "
                f"{self.limit} tokens; nothing is left to train on"
            )
        # If all scanned rows fit, the range, which takes no memory. Of a sampled file all do, or
        # `check` has raised.
        return own if len(kept) == len(scanned) else kept

    def _must_measure(self, row: dict) -> bool:
        """Return whether a row must be tokenised at start.

        It need not if its bytes are few enough. A row with images, of which a file may have very
        many, is checked when a step takes it, unless it may have to be dropped.
        """
        if may_hold_images(row):
            return self.overlong == "drop"
        return _text_bytes(row) > self.limit


def _with_bar(indices: Sequence[int], *, what: str) -> Iterable[int]:
    """Return indices that show a progress bar on rank 0 if they take long."""
    return tqdm(
        indices,
        desc=f"measuring rows of {what.rpartition(':')[0] or what}",
        unit=" rows",
        delay=_BAR_AFTER_S,
        mininterval=0.5 if sys.stderr.isatty() else 5,
        disable=known_rank() not in ("0", "?"),
        leave=False,
    )


def _text_bytes(row: dict) -> int:
    """Return an upper bound on the tokens of a row: its UTF-8 bytes, since a token covers at least
    one byte, plus an allowance for special tokens and templates."""
    names = ("prompt", "messages", "completion", "answer", "text", "tools", "chosen", "rejected")
    total = 512  # for a system prompt in the template
    for value in map(row.get, names):
        if isinstance(value, str):
            total += len(value.encode())
        elif value is not None:
            total += len(json.dumps(value, ensure_ascii=False, default=str).encode())
            total += 32 * len(value) if isinstance(value, list) else 0
    return total


def cached_rows(rows: SourcesRows, tokenizer: PreTrainedTokenizerBase) -> int:
    """Return how many processed rows to keep: few if they may hold prepared images."""
    return _CACHED_WITH_IMAGES if reads_images(tokenizer) else rows.cache_size


def make_order(cfg: Config, kept: Chain) -> RowOrder:
    """Return the order in which steps take the usable rows.

    Raises: Refusal if a step would repeat rows.
    """
    sources = cfg.data.sources("train")
    per_step = cfg.batch.prompts_per_step
    if not any(source.weight for source in sources):
        return Order(len(kept), per_step=per_step, seed=cfg.seed, shuffle=cfg.data.shuffle)
    return WeightedOrder(
        [len(part) for part in kept.parts],
        [source.weight for source in sources],
        names=[source.name for source in sources],
        per_step=per_step,
        seed=cfg.seed,
        shuffle=cfg.data.shuffle,
    )


class _Encoder:
    """Turns rows into prompts, and finds the rows that fit."""

    def __init__(self, cfg: Config, tokenizer: PreTrainedTokenizerBase):
        self.cfg = cfg
        self.tokenizer = tokenizer
        limit = cfg.data.max_prompt_tokens
        self._fit = Fit(limit, "data.max_prompt_tokens", cfg.data.overlong_prompts)

    def usable(self, rows: SourcesRows) -> Chain:
        """Return the rows that fit; see Fit."""
        return self._fit.usable(rows, measure=lambda i: len(self._tokens(rows, i)[0]))

    def prompt(self, rows: SourcesRows, index: int) -> Prompt:
        """Return the prompt of a row."""
        tokens, text, row = self._tokens(rows, index)
        if self._fit.overlong == "error":
            self._fit.check(rows, index, length=len(tokens))
        return Prompt(index, tokens, text, row, rows.source(index), rows.where(index))

    def _tokens(self, rows: SourcesRows, index: int) -> tuple[TokenIds, str, dict]:
        row = rows[index]
        where = rows.where(index)
        row_sampling(row, self.cfg, where=where)  # raises Refusal for invalid values
        tokens, text = encode_prompt(
            prompt_of(row),
            self.tokenizer,
            template=self.cfg.data.chat_template,
            tools=row.get("tools"),
            where=where,
            prefix=self.cfg.data.generation_prefix,
            images=row_images(row, where=where),
            files=ImageFiles(self.cfg.data.images, rows.folder(index)),
        )
        if not tokens:
            raise Refusal(f"{where}: the prompt {text!r:.40} has no tokens")
        return tokens, text, row


def held_out_prompts(cfg: Config, tokenizer: PreTrainedTokenizerBase) -> list[Prompt]:
    """Return the prompts of data.eval, in the order of their source; empty without.

    Raises: Refusal as `PromptSource`.
    """
    if not cfg.data.eval:
        return []
    encoder = _Encoder(cfg, tokenizer)
    rows = load_rows(cfg, split="eval")
    return [encoder.prompt(rows, i) for i in encoder.usable(rows)]


def _check_column(cfg: Config, rows: SourcesRows) -> None:
    """Check the sampling column of data.train; of a file on disk, in its first rows.

    Raises: Refusal for invalid values, and for a column that no row has.
    """
    found = False
    for part, own in enumerate(rows.parts):
        indices = rows.indices(part)
        for i in indices if own.is_held else indices[:TRIED_ROWS]:
            row = rows[i]
            row_sampling(row, cfg, where=rows.where(i))
            found = found or cfg.sampling.column in row
    if found or rows.is_on_disk:
        return
    held_out = load_rows(cfg, split="eval")
    if not any(cfg.sampling.column in held_out[i] for i in range(len(held_out))):
        raise Refusal(
            f"sampling.column: no row has a column {cfg.sampling.column!r}, so that it would "
            f"change nothing; columns of the first are {', '.join(map(str, rows[0]))}. Name "
            "another, or leave it out"
        )


class PromptSource:
    """Prompts of each step and of the held-out set, tokenised when they are first needed.

    Raises (on construction): Refusal for unreadable or empty data, a row without a prompt
        (file and line), a prompt above data.max_prompt_tokens under overlong_prompts=error, or a
        row that needs a chat template when there is none.
    """

    def __init__(self, cfg: Config, tokenizer: PreTrainedTokenizerBase):
        self.cfg = cfg
        self.tokenizer = tokenizer
        encoder = _Encoder(cfg, tokenizer)
        rows = load_rows(cfg, split="train")
        if cfg.hints_teacher:
            TeacherPrompts(cfg, tokenizer, rows).check(tried=TRIED_ROWS)
        self._prompt = functools.lru_cache(maxsize=cached_rows(rows, tokenizer))(
            functools.partial(encoder.prompt, rows)
        )
        if cfg.sampling.column:
            _check_column(cfg, rows)
        self.kept = encoder.usable(rows)
        self.num_dropped = len(rows) - len(self.kept)
        self.order = make_order(cfg, self.kept)
        self._eval: list[Prompt] | None = None

    @property
    def steps_per_epoch(self) -> float:
        """Return how many steps one pass over the usable rows takes."""
        return self.order.num_rows / self.order.per_step

    def at(self, step: int) -> list[Prompt]:
        """Return the prompts of `step`, the same on every rank."""
        return self.of(self.order.at(step))

    def of(self, positions: Iterable[int]) -> list[Prompt]:
        """Return the prompts at positions among the usable rows."""
        return in_file_order(self._prompt, [self.kept[i] for i in positions])

    def eval(self) -> list[Prompt]:
        """Return the held-out prompts; see `held_out_prompts`."""
        if self._eval is None:
            self._eval = held_out_prompts(self.cfg, self.tokenizer)
        return self._eval


def check_context(
    cfg: Config,
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_positions: int | None,
    vocab_size: int | None = None,
) -> None:
    """Check that the longest sequence and the tokenizer's ids fit the model.

    If nothing is sampled, rows that are too long for the model are found when data.train is opened.

    Args:
        max_positions: tokens that a sequence may have in the model; None for any number.
        vocab_size: rows of the model's embedding; None if that is not known.
    Raises: Refusal with the arithmetic.
    """
    prompt = cfg.data.max_prompt_tokens
    response = cfg.sampling.max_response_tokens
    if cfg.objective.samples and max_positions and cfg.longest_sequence > max_positions:
        raise Refusal(
            f"data.max_prompt_tokens {prompt} + sampling.max_response_tokens {response} = "
            f"{cfg.longest_sequence} tokens, above the model's context of {max_positions}; lower "
            "one of them"
        )
    if cfg.objective.samples and max_positions and cfg.longest_in_engine > max_positions:
        judge = cfg.rewards.judge
        raise Refusal(
            f"rewards.judge.max_prompt_tokens {judge.max_prompt_tokens} + max_response_tokens "
            f"{judge.max_response_tokens} = {cfg.longest_in_engine} tokens, above the model's "
            f"context of {max_positions}; lower one of them"
        )
    if vocab_size is not None and len(tokenizer) > vocab_size:
        raise Refusal(
            f"the tokenizer of {cfg.model.tokenizer or cfg.model.path} has {len(tokenizer)} "
            f"tokens, the model's embedding {vocab_size} rows; they do not belong together"
        )
