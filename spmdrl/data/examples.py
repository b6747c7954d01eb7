"""Rows of the offline objectives as (tokens, response_mask): responses marked on token ids.

A row is rendered turn by turn, the way it is generated: the text up to a response, then the
response. Each longer text must begin with the shorter one, so a response is the ids that its
turn adds, and no token straddles the border between what the policy is given and what it has
to write.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from spmdrl.algorithms import registry
from spmdrl.algorithms.preference.unpaired import mismatched
from spmdrl.config import Config
from spmdrl.data.hashed import hashed
from spmdrl.data.prompts import Fit, apply_template, encode_plain, make_order
from spmdrl.data.rows import Messages, Need, label_of, pair_of
from spmdrl.data.sources import load_rows
from spmdrl.errors import Refusal
from spmdrl.imports import refusing

Example = tuple[list[int], list[bool]]


@dataclass(frozen=True)
class Unit:
    """The sequences of one row, which train together."""

    examples: tuple[Example, ...]
    """One to imitate; or (chosen, rejected); or (own, mismatched), see LabelledSource."""
    rewards: tuple[float, ...]
    """Per sequence: the margin of a pair, or the label 1 or 0, at the first; else 0."""
    source: int = 0
    """Number of the source in data.train."""


def example_source(cfg: Config, tokenizer: PreTrainedTokenizerBase) -> ExampleSource:
    """Return the source of rows that an offline objective trains on.

    Raises: Refusal for data that cannot be used; see the sources.
    """
    sources = {"example": SupervisedSource, "pair": PairSource, "label": LabelledSource}
    return sources[row_kind(cfg)](cfg, tokenizer)


def row_kind(cfg: Config) -> Need:
    """Return what a row of data.train must hold: a pair is one labelled response to some losses.

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

    Raises (on construction): Refusal for unreadable or empty data, a row without what it needs
        (file and line), one that the chat template cannot render, or one with a sequence above
        `limit` under overlong_prompts=error.
    """

    need: Need
    """What a row must hold."""

    def __init__(self, cfg: Config, tokenizer: PreTrainedTokenizerBase):
        self.cfg, self.tokenizer = cfg, tokenizer
        self.rows = load_rows(cfg, split="train", need=self.need)
        self._fit = Fit(*self.limit(), cfg.data.overlong_prompts)
        self._unit = functools.lru_cache(maxsize=self.rows.cache_size)(self._encode)
        self._kept = self._fit.usable(self.rows, measure=lambda i: _longest(self._unit(i)))
        self.num_dropped = len(self.rows) - len(self._kept)
        self.order = make_order(cfg, self._kept)

    def limit(self) -> tuple[int, str]:
        """Return the longest sequence allowed, tokens, and the fields that say so."""
        longest = self.cfg.longest_sequence
        return longest, "data.max_prompt_tokens + sampling.max_response_tokens"

    def units_at(self, step: int) -> list[Unit]:
        """Return the units of `step`, the same on every rank."""
        return [self.unit(self._kept[i]) for i in self.order.at(step)]

    def rows_of_run(self) -> list[int]:
        """Return which rows the run's steps take, ascending: all, unless it ends before."""
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
        return replace(unit, source=self.rows.source(index))

    def _encode(self, index: int) -> Unit:
        raise NotImplementedError

    def _example(self, index: int, row: dict) -> Example:
        return encode_example(
            row, self.tokenizer, template=self.cfg.data.chat_template, where=self.rows.where(index)
        )


class SupervisedSource(ExampleSource):
    """Supervised rows, each a unit of one sequence; no longer than tokens_per_microbatch."""

    need: Need = "example"

    def limit(self) -> tuple[int, str]:
        """As ExampleSource."""
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
        tools = self.rows[index].get("tools")
        return self._example(index, {"prompt": prompt, "completion": response, "tools": tools})


class LabelledSource(PairSource):
    """Single responses marked good or bad, each with one that belongs to another prompt.

    A unit is the row's own sequence, whose reward is the label, and its prompt with the
    response of another row of the step, for KTO's KL. That response is cut where the sequence
    would exceed the longest allowed.

    Raises (on construction): Refusal as ExampleSource; see `rows.label_of`.
    """

    need = "label"

    def units_at(self, step: int) -> list[Unit]:
        """Return the rows of `step`, (own, mismatched), the same on every rank.

        Raises: Refusal when all rows of the step have one prompt.
        """
        own = super().units_at(step)
        split = [_split(unit.examples[0]) for unit in own]
        prompts = [hashed(repr(given)) >> 1 for given, _, _ in split]
        with refusing(f"data.train, step {step}", Refusal):
            others = mismatched(torch.tensor(prompts))
        units = []
        for unit, (given, _, _), other in zip(own, split, others.tolist()):
            room = self._fit.limit - len(given)
            _, reply, mask = split[other]
            example = (given + reply[:room], [False] * len(given) + mask[:room])
            both = replace(unit, examples=(*unit.examples, example), rewards=(*unit.rewards, 0.0))
            units.append(both)
        return units

    def _encode(self, index: int) -> Unit:
        row = self.rows[index]
        label = label_of(row, place=self.rows.where(index))
        return Unit((self._reply(index, row["prompt"], row["completion"]),), (float(label),))


def _longest(unit: Unit) -> int:
    return max(len(tokens) for tokens, _ in unit.examples)


def _split(example: Example) -> tuple[list[int], list[int], list[bool]]:
    """Return the tokens before the first response token, those from it on, and their mask."""
    tokens, mask = example
    first = mask.index(True)
    return tokens[:first], tokens[first:], mask[first:]


def encode_example(
    row: dict, tokenizer: PreTrainedTokenizerBase, *, template: str, where: str
) -> Example:
    """Turn one supervised row into token ids and a mask of those to imitate.

    `prompt` with `completion` (or `answer`) trains the completion and the token that ends it;
    `messages` trains every assistant turn up to its end-of-turn token; `text` trains all but
    the first token, which nothing predicts.

    Args:
        row: see the module `rows`.
        template: `auto`, `always` or `never`; see data.chat_template.
        where: origin of the row, for error messages.
    Returns: tokens [T] and response_mask [T]; the last token is trained.
    Raises: Refusal when the row cannot be rendered or nothing in it is to be trained.
    """
    prompt = row.get("prompt")
    show = functools.partial(
        apply_template, tokenizer=tokenizer, template=template, tools=row.get("tools"), where=where
    )
    if prompt:
        completion = row.get("completion") or row.get("answer")
        if not isinstance(completion, (str, list)):
            raise Refusal(
                f"{where}: the response to imitate must be text or messages, got {completion!r:.60}"
            )
        if isinstance(prompt, list) or isinstance(completion, list) or template == "always":
            context = _as_messages(prompt, role="user")
            talk = context + _as_messages(completion, role="assistant")
            return _encode_conversation(talk, tokenizer, show=show, first=len(context), where=where)
        given = encode_plain(prompt, tokenizer)
        whole = encode_plain(prompt + completion, tokenizer)
        added = _added_ids(given, whole, text=completion, tokenizer=tokenizer)
        added = _closed(added, tokenizer, where=where)
        return given + added, [False] * len(given) + [True] * len(added)
    if row.get("messages"):
        return _encode_conversation(row["messages"], tokenizer, show=show, first=0, where=where)
    tokens = _closed(encode_plain(row["text"], tokenizer), tokenizer, where=where)
    if len(tokens) < 2:
        raise Refusal(f"{where}: the text {row['text']!r:.40} has no tokens to imitate")
    return tokens, [False] + [True] * (len(tokens) - 1)


def _as_messages(value: str | Messages, *, role: str) -> Messages:
    return list(value) if isinstance(value, list) else [{"role": role, "content": value}]


def _closed(tokens: list[int], tokenizer: PreTrainedTokenizerBase, *, where: str) -> list[int]:
    if tokenizer.eos_token_id is None:
        raise Refusal(f"{where}: plain text ends with eos, and the tokenizer has none")
    if tokens and tokens[-1] == tokenizer.eos_token_id:
        return tokens
    return tokens + [tokenizer.eos_token_id]


def _added_ids(
    given: list[int], whole: list[int], *, text: str, tokenizer: PreTrainedTokenizerBase
) -> list[int]:
    if whole[: len(given)] == given:
        return whole[len(given) :]
    # A token of the whole text straddles the border. The policy never sees that one, because
    # its prompt is tokenised alone: so is what follows.
    return _ids(text, tokenizer)


def _encode_conversation(
    messages: Messages,
    tokenizer: PreTrainedTokenizerBase,
    *,
    show: Callable[..., str],
    first: int,
    where: str,
) -> Example:
    ends = _special_ids(tokenizer)
    tokens: list[int] = []
    mask: list[bool] = []
    done = ""
    for i in _reply_turns(messages, first=first, where=where):
        before = show(messages[:i], add_generation_prompt=True)
        after = show(messages[: i + 1])
        given = _continuation(done, before, turn=i, where=where)
        tokens += _added_ids(tokens, _ids(before, tokenizer), text=given, tokenizer=tokenizer)
        mask += [False] * (len(tokens) - len(mask))
        reply = _continuation(before, after, turn=i, where=where)
        added = _added_ids(tokens, _ids(after, tokenizer), text=reply, tokenizer=tokenizer)
        length = max((k + 1 for k, token in enumerate(added) if token in ends), default=0)
        if not length:
            raise Refusal(
                f"{where}: the chat template closes assistant turn {i} with {reply[-20:]!r}, which "
                "holds no special token, so the policy could not learn to stop"
            )
        tokens += added
        mask += [True] * length + [False] * (len(added) - length)
        done = after
    # What follows the last end-of-turn token (a newline, as a rule) predicts nothing.
    length = len(mask) - mask[::-1].index(True)
    return tokens[:length], mask[:length]


def _reply_turns(messages: Messages, *, first: int, where: str) -> list[int]:
    turns = [i for i in range(first, len(messages)) if messages[i]["role"] == "assistant"]
    if not turns:
        raise Refusal(f"{where}: the conversation has no assistant turn to imitate")
    if turns[0] == 0:
        raise Refusal(
            f"{where}: the conversation begins with an assistant turn; it needs one turn before it"
        )
    return turns


def _continuation(before: str, after: str, *, turn: int, where: str) -> str:
    if after.startswith(before):
        return after[len(before) :]
    same = next((i for i, (a, b) in enumerate(zip(before, after)) if a != b), len(after))
    raise Refusal(
        f"{where}: the chat template rewrites earlier text when turn {turn} is added, so what the "
        f"policy would see is ambiguous: {before[same : same + 60]!r} became "
        f"{after[same : same + 60]!r}; use rows with one assistant turn, or another template"
    )


def _ids(text: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def _special_ids(tokenizer: PreTrainedTokenizerBase) -> set[int]:
    added: dict[int, Any] = getattr(tokenizer, "added_tokens_decoder", {})
    named = {i for i, token in added.items() if getattr(token, "special", False)}
    return named | set(tokenizer.all_special_ids)
