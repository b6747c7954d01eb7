"""Prompts of each step, a pure function of (seed, step): no rank tells another what to take."""

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
from spmdrl.data.templates import encode_prompt
from spmdrl.errors import Refusal
from spmdrl.model_inputs import TokenIds
from spmdrl.types import Prompt
from spmdrl.world.launch import known_rank

# So many first rows are tokenised at start; of a generated task no others are looked at, which are
# all alike, nor of a file that stays on disk, whose rows are checked when their turn comes.
_TRIED_ROWS = 256
_CACHED_SEEN = 64
_QUIET_S = 2.0
"""So long rows are measured without a bar."""


@dataclass(frozen=True)
class Fit:
    """How long a row may be, and what becomes of one that is longer."""

    limit: int
    """Tokens."""
    field: str
    """The config field that sets the limit, for messages."""
    overlong: str
    """`error` or `drop`."""
    can_be_raised: bool = True
    """Whether `field` is one that a user sets."""

    def check(self, rows: SourcesRows, index: int, *, length: int) -> None:
        """Raise Refusal naming a row that is too long, tokens."""
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
        Returns: indices of the rows to use, source by source. Behind the first 256 rows of one
            those whose bytes already fit are not tokenised, so that opening a large file stays
            cheap.
        Raises: Refusal naming the first overlong row, or when a source has none left.
        """
        parts = range(len(rows.parts))
        return Chain([self._usable_of(rows, part, measure=measure) for part in parts])

    def _usable_of(
        self, rows: SourcesRows, part: int, *, measure: Callable[[int], int]
    ) -> Sequence[int]:
        own = rows.indices(part)
        is_sampled = not rows.parts[part].is_held and self.overlong == "error"
        scanned = own[:_TRIED_ROWS] if is_sampled else own
        kept = []
        for i in _shown(scanned, what=rows.where(own.start)):
            is_left = i - own.start >= _TRIED_ROWS and self._is_left(rows[i])
            length = 0 if is_left else measure(i)
            if self.overlong == "error":
                self.check(rows, i, length=length)
            if length <= self.limit:
                kept.append(i)
        if not kept:
            raise Refusal(
                f"{rows.where(own.start)} and all {len(own)} rows are longer than {self.field} = "
                f"{self.limit} tokens; nothing is left to train on"
            )
        return own if len(kept) == len(scanned) else kept

    def _is_left(self, row: dict) -> bool:
        """Return whether a row need not be tokenised at start: its bytes fit; or it holds
        attachments, of which a file may have very many, and is checked when its turn comes."""
        if may_hold_images(row):
            return self.overlong == "error"
        return _text_bytes(row) <= self.limit


def _shown(indices: Sequence[int], *, what: str) -> Iterable[int]:
    """Return indices, which show a bar with the time left where they take long, on rank 0."""
    return tqdm(
        indices,
        desc=f"rows of {what.rpartition(':')[0] or what} held against the limit",
        unit=" rows",
        delay=_QUIET_S,
        mininterval=0.5 if sys.stderr.isatty() else 5,
        disable=known_rank() not in ("0", "?"),
        leave=False,
    )


def _text_bytes(row: dict) -> int:
    """Return an upper bound on the tokens of a row under a tokenizer whose tokens cover at
    least one byte each: its UTF-8 bytes plus allowances for special tokens and templates."""
    names = ("prompt", "messages", "completion", "answer", "text", "tools", "chosen", "rejected")
    columns = [row.get(c) for c in names]
    total = 512  # a template's own system prompt
    for value in columns:
        if isinstance(value, str):
            total += len(value.encode())
        elif value is not None:
            total += len(json.dumps(value, ensure_ascii=False, default=str).encode())
            total += 32 * len(value) if isinstance(value, list) else 0
    return total


def cached_rows(rows: SourcesRows, tokenizer: PreTrainedTokenizerBase) -> int:
    """Return of how many rows to keep what was made: few where it holds what was prepared."""
    return _CACHED_SEEN if reads_images(tokenizer) else rows.cache_size


def make_order(cfg: Config, kept: Chain) -> RowOrder:
    """Return which of the usable rows each step takes.

    Raises: Refusal where a step would repeat rows.
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
    """Prompts of rows, and which rows fit."""

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
        row_sampling(row, self.cfg, where=where)  # refuses what cannot be
        tokens, text = encode_prompt(
            prompt_of(row),
            self.tokenizer,
            template=self.cfg.data.chat_template,
            tools=row.get("tools"),
            where=where,
            prefix=self.cfg.data.generation_prefix,
            held=row_images(row, where=where),
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
    """Look at what rows of data.train say of their own sampling, of those on disk at the first.

    Raises: Refusal for what cannot be, and for a column that no row has.
    """
    found = False
    for part, own in enumerate(rows.parts):
        indices = rows.indices(part)
        for i in indices if own.is_held else indices[:_TRIED_ROWS]:
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
    """Prompts of each step and of the held-out set, tokenised when first asked for.

    Raises (on construction): Refusal for unreadable or empty data, a row without a prompt
        (file and line), a prompt above data.max_prompt_tokens under overlong_prompts=error, a
        missing chat template where a row needs one.
    """

    def __init__(self, cfg: Config, tokenizer: PreTrainedTokenizerBase):
        self.cfg = cfg
        self.tokenizer = tokenizer
        encoder = _Encoder(cfg, tokenizer)
        rows = load_rows(cfg, split="train")
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

    Where nothing is sampled the rows are as long as they are: those that the model has no positions
    for are found when data.train is opened.

    Args:
        max_positions: tokens of a sequence; None for any number.

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
    if vocab_size is not None and len(tokenizer) > vocab_size:
        raise Refusal(
            f"the tokenizer of {cfg.model.tokenizer or cfg.model.path} has {len(tokenizer)} "
            f"tokens, the model's embedding {vocab_size} rows; they do not belong together"
        )
