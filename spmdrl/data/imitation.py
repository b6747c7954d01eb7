"""A supervised row as token ids, a mask of those to imitate, and what they show."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedTokenizerBase

from spmdrl.config import ImageSettings
from spmdrl.data.images import ImageFiles, column_images, inlined, split
from spmdrl.data.processor import encode, image_reader_of
from spmdrl.data.rows import Messages
from spmdrl.data.templates import Seen, apply_template
from spmdrl.errors import Refusal
from spmdrl.pictures import Pictures


class Example(NamedTuple):
    """One sequence to train on."""

    tokens: list[int]
    mask: list[bool]
    """Of those to imitate."""
    pictures: Pictures | None = None
    """Of the tokens; None where the model does not see."""

    def part(self, begin: int, end: int) -> Example:
        """Return the tokens from `begin` to before `end`."""
        tokens, shown = self.tokens[begin:end], self.pictures
        if shown is not None:
            shown = shown[torch.arange(begin, begin + len(tokens))]
        return Example(tokens, self.mask[begin:end], shown)

    def followed_by(self, other: Example) -> Example:
        """Return both, one after the other."""
        lengths = [len(self.tokens), len(other.tokens)]
        shown = Pictures.concat([self.pictures, other.pictures], lengths)
        return Example(self.tokens + other.tokens, self.mask + other.mask, shown)


def encode_example(
    row: dict,
    tokenizer: PreTrainedTokenizerBase,
    *,
    template: str,
    where: str,
    files: ImageFiles | None = None,
) -> Example:
    """Turn one supervised row into token ids and a mask of those to imitate.

    `prompt` with `completion` (or `answer`) trains the completion and the token that ends it;
    `messages` trains every assistant turn up to its end-of-turn token; `text` trains all but
    the first token, which nothing predicts.

    Args:
        row: see the module `rows`.
        template: `auto`, `always` or `never`; see data.chat_template.
        where: origin of the row, for error messages.
        files: where images of the row are; by default in itself.
    Returns: tokens [T], response_mask [T] and pictures; the last token is trained.
    Raises: Refusal when the row cannot be rendered or nothing in it is to be trained.
    """
    prompt, images = row.get("prompt"), column_images(row, where=where)
    seen = Seen(tokenizer, files=files or ImageFiles(ImageSettings()), where=where)
    show = functools.partial(
        apply_template, tokenizer=tokenizer, template=template, tools=row.get("tools"), where=where
    )
    if prompt:
        completion = row.get("completion") or row.get("answer")
        if not isinstance(completion, (str, list)):
            raise Refusal(
                f"{where}: the response to imitate must be text or messages, got {completion!r:.60}"
            )
        if isinstance(prompt, str) and isinstance(completion, str) and template != "always":
            return _plain_example(prompt, completion, images, seen)
        context = _as_messages(prompt, role="user")
        talk = context + _as_messages(completion, role="assistant")
        talk = inlined(talk, images, where=where)
        return _encode_conversation(talk, seen, show=show, first=len(context))
    if row.get("messages"):
        talk = inlined(row["messages"], images, where=where)
        return _encode_conversation(talk, seen, show=show, first=0)
    return _text_example(row["text"], images, seen)


def _plain_example(prompt: str, completion: str, images: Sequence[Any], seen: Seen) -> Example:
    given, _, shown = seen.plain(prompt, images)
    whole, *_ = seen.plain(prompt, images, end=completion)
    added = whole[len(given) :]
    if whole[: len(given)] != given:  # see _Turns.add
        added = seen.tokenizer(completion, add_special_tokens=False)["input_ids"]
    added = _closed(added, seen.tokenizer, where=seen.where)
    reply = Example(added, [True] * len(added))
    return Example(given, [False] * len(given), shown).followed_by(reply)


def _text_example(text: str, images: Sequence[Any], seen: Seen) -> Example:
    begun, _, shown = seen.plain(text, images)
    tokens = _closed(begun, seen.tokenizer, where=seen.where)
    if len(tokens) < 2:
        raise Refusal(f"{seen.where}: the text {text!r:.40} has no tokens to imitate")
    # What stands for an image is given: nobody writes it.
    is_given = [False] * len(begun) if shown is None else (shown.places >= 0).tolist()
    is_given[:1] = [True]
    end = Example(tokens[len(begun) :], [True] * (len(tokens) - len(begun)))
    return Example(begun, [not given for given in is_given], shown).followed_by(end)


def _as_messages(value: str | Messages, *, role: str) -> Messages:
    return list(value) if isinstance(value, list) else [{"role": role, "content": value}]


def _closed(tokens: list[int], tokenizer: PreTrainedTokenizerBase, *, where: str) -> list[int]:
    if tokenizer.eos_token_id is None:
        raise Refusal(f"{where}: plain text ends with eos, and the tokenizer has none")
    if tokens and tokens[-1] == tokenizer.eos_token_id:
        return tokens
    return tokens + [tokenizer.eos_token_id]


class _Turns:
    """The ids of a conversation that is rendered turn by turn, and what they show.

    Args:
        images: of the conversation, in order.
    """

    def __init__(self, seen: Seen, images: Sequence[Any]):
        seen.check(images)
        self._seen, self._images = seen, seen.files.opened(images, where=seen.where)
        self.tokens: list[int] = []
        self.mask: list[bool] = []
        self._pictures: list[Pictures | None] = []
        self._lengths: list[int] = []

    @property
    def pictures(self) -> Pictures | None:
        """Return what all tokens show."""
        return Pictures.concat(self._pictures, self._lengths)

    def add(self, whole: str, piece: str) -> list[int]:
        """Append the ids that a text adds to those so far, unmasked, and return them.

        Args:
            whole: the conversation up to here, of which `piece` is the end.
        """
        before = len(self.tokens)
        ids, shown = self._encoded(whole, self._count(whole))
        if ids[:before] == self.tokens:
            shown = None if shown is None else shown[torch.arange(before, len(ids))]
            ids = ids[before:]
        else:
            # A token of the whole text straddles the border. The policy never sees that one,
            # because its prompt is tokenised alone: so is what follows.
            ids, shown = self._encoded(piece, self._count(whole), begin=self._count(whole, piece))
        self.tokens += ids
        self._pictures.append(shown)
        self._lengths.append(len(ids))
        self.mask += [False] * len(ids)
        return ids

    def _count(self, whole: str, piece: str = "") -> int:
        """Return how many images stand in a text, before a piece at its end."""
        reader = image_reader_of(self._seen.tokenizer)
        if reader is None:
            return 0
        return whole.count(reader.placeholder) - piece.count(reader.placeholder)

    def _encoded(self, text: str, end: int, *, begin: int = 0) -> tuple[list[int], Pictures | None]:
        images = self._images[begin:end]
        return encode(text, self._seen.tokenizer, images=images, where=self._seen.where)


def _encode_conversation(
    messages: Messages, seen: Seen, *, show: Callable[..., str], first: int
) -> Example:
    bare, images = split(messages)
    ends, where = _special_ids(seen.tokenizer), seen.where
    turns, done = _Turns(seen, images), ""
    for i in _reply_turns(bare, first=first, where=where):
        before = show(bare[:i], add_generation_prompt=True)
        after = show(bare[: i + 1])
        turns.add(before, _continuation(done, before, turn=i, where=where))
        reply = _continuation(before, after, turn=i, where=where)
        added = turns.add(after, reply)
        length = max((k + 1 for k, token in enumerate(added) if token in ends), default=0)
        if not length:
            raise Refusal(
                f"{where}: the chat template closes assistant turn {i} with {reply[-20:]!r}, which "
                "holds no special token, so the policy could not learn to stop"
            )
        begin = len(turns.mask) - len(added)
        turns.mask[begin : begin + length] = [True] * length
        done = after
    # What follows the last end-of-turn token (a newline, as a rule) predicts nothing.
    mask, shown = turns.mask, turns.pictures
    length = len(mask) - mask[::-1].index(True)
    shown = None if shown is None else shown[torch.arange(length)]
    return Example(turns.tokens[:length], mask[:length], shown)


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


def _special_ids(tokenizer: PreTrainedTokenizerBase) -> set[int]:
    added: dict[int, Any] = getattr(tokenizer, "added_tokens_decoder", {})
    named = {i for i, token in added.items() if getattr(token, "special", False)}
    return named | set(tokenizer.all_special_ids)
