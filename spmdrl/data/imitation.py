"""Turns a supervised row into token ids and a mask of those to imitate."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase

from spmdrl.data.attachments import (
    ImageFiles,
    MultimodalEncoder,
    inline_images,
    row_images,
    split_images,
)
from spmdrl.data.rows import Messages
from spmdrl.data.templates import apply_template
from spmdrl.errors import Refusal
from spmdrl.model_inputs import TokenIds


class Example(NamedTuple):
    """One sequence to train on."""

    tokens: TokenIds
    mask: list[bool]
    """True for tokens to imitate."""

    def part(self, begin: int, end: int) -> Example:
        """Return the tokens from `begin` to before `end`."""
        return Example(self.tokens[begin:end], self.mask[begin:end])

    def followed_by(self, other: Example) -> Example:
        """Return both, one after the other."""
        return Example(self.tokens + other.tokens, self.mask + other.mask)


def encode_example(
    row: dict,
    tokenizer: PreTrainedTokenizerBase,
    *,
    template: str,
    where: str,
    files: ImageFiles | None = None,
) -> Example:
    """Turn one supervised row into token ids and a mask of those to imitate.

    `prompt` with `completion` (or `answer`) trains the completion and the token that ends it.
    `messages` trains every assistant turn up to its end-of-turn token. `text` trains all tokens but
    the first, which nothing predicts.

    Args:
        row: see the module `rows`.
        template: `auto`, `always` or `never`; see data.chat_template.
        where: origin of the row, for error messages.
        files: opens the images of the row; by default they are in the row itself.
    Returns: tokens [T] and mask [T]; the last token is trained.
    Raises: Refusal when the row cannot be rendered or holds nothing to train.
    """
    prompt = row.get("prompt")
    images = row_images(row, where=where)
    encoder = MultimodalEncoder(tokenizer, files=files or ImageFiles(), where=where)
    render = functools.partial(
        apply_template, tokenizer=tokenizer, template=template, tools=row.get("tools"), where=where
    )
    if prompt:
        completion = row.get("completion") or row.get("answer")
        if not isinstance(completion, (str, list)):
            raise Refusal(
                f"{where}: the response to imitate must be text or messages, got {completion!r:.60}"
            )
        if isinstance(prompt, str) and isinstance(completion, str) and template != "always":
            return _plain_example(prompt, completion, images, encoder)
        context = _as_messages(prompt, role="user")
        messages = context + _as_messages(completion, role="assistant")
        messages = inline_images(messages, images, where=where)
        return _encode_conversation(messages, encoder, render=render, first=len(context))
    if row.get("messages"):
        messages = inline_images(row["messages"], images, where=where)
        return _encode_conversation(messages, encoder, render=render, first=0)
    return _text_example(row["text"], images, encoder)


def _plain_example(
    prompt: str, completion: str, images: Sequence[Any], encoder: MultimodalEncoder
) -> Example:
    context, _ = encoder.encode_plain(prompt, images)
    whole, _ = encoder.encode_plain(prompt, images, end=completion)
    response = whole[len(context) :]
    if whole[: len(context)] != context:  # see _Turns.add
        response = TokenIds(encoder.tokenizer(completion, add_special_tokens=False)["input_ids"])
    response = _with_eos(response, encoder.tokenizer, where=encoder.where)
    mask = [False] * len(context) + [True] * len(response)
    return Example(context + response, mask)


def _text_example(text: str, images: Sequence[Any], encoder: MultimodalEncoder) -> Example:
    tokens, _ = encoder.encode_plain(text, images)
    tokens = _with_eos(tokens, encoder.tokenizer, where=encoder.where)
    if len(tokens) < 2:
        raise Refusal(f"{encoder.where}: the text {text!r:.40} has no tokens to imitate")
    # A policy never writes the tokens that stand for images.
    mask = [not is_placeholder for is_placeholder in tokens.are_placeholders]
    return Example(tokens, [False, *mask[1:]])


def _as_messages(value: str | Messages, *, role: str) -> Messages:
    return list(value) if isinstance(value, list) else [{"role": role, "content": value}]


def _with_eos(tokens: TokenIds, tokenizer: PreTrainedTokenizerBase, *, where: str) -> TokenIds:
    if tokenizer.eos_token_id is None:
        raise Refusal(f"{where}: plain text ends with eos, and the tokenizer has none")
    if tokens and tokens[-1] == tokenizer.eos_token_id:
        return tokens
    return tokens + [tokenizer.eos_token_id]


class _Turns:
    """The ids of a conversation that is rendered turn by turn.

    Args:
        images: of the conversation, in order.
    """

    def __init__(self, encoder: MultimodalEncoder, images: Sequence[Any]):
        self._encoder = encoder
        self._images = encoder.open(images)
        self.tokens = TokenIds()
        self.mask: list[bool] = []

    def add(self, whole: str, piece: str) -> TokenIds:
        """Append the ids of the next text, with a mask of False, and return them.

        Args:
            whole: the conversation up to the end of this text.
            piece: this text, the end of `whole`.
        """
        before = len(self.tokens)
        end = self._encoder.count_placeholders(whole)
        ids = self._encoder.encode_opened(whole, self._images[:end])
        if [*ids[:before]] == [*self.tokens]:
            ids = ids[before:]
        else:
            # A token of the whole text crosses the border. The policy never sees that token,
            # because its prompt is tokenised alone; so the next text is tokenised alone too.
            own = self._images[end - self._encoder.count_placeholders(piece) : end]
            ids = self._encoder.encode_opened(piece, own)
        self.tokens += ids
        self.mask += [False] * len(ids)
        return ids


def _encode_conversation(
    messages: Messages, encoder: MultimodalEncoder, *, render: Callable[..., str], first: int
) -> Example:
    bare, images = split_images(messages)
    ends = _special_ids(encoder.tokenizer)
    where = encoder.where
    turns = _Turns(encoder, images)
    done = ""
    for i in _reply_turns(bare, first=first, where=where):
        before = render(bare[:i], add_generation_prompt=True)
        after = render(bare[: i + 1])
        turns.add(before, _continuation(done, before, turn=i, where=where))
        reply = _continuation(before, after, turn=i, where=where)
        added = turns.add(after, reply)
        # Up to the last end-of-turn token.
        length = 0
        for number, token in enumerate(added, 1):
            if token in ends:
                length = number
        if not length:
            raise Refusal(
                f"{where}: the chat template closes assistant turn {i} with {reply[-20:]!r}, which "
                "holds no special token, so the policy could not learn to stop"
            )
        begin = len(turns.mask) - len(added)
        turns.mask[begin : begin + length] = [True] * length
        done = after
    # Tokens after the last end-of-turn token, usually a newline, train nothing.
    length = len(turns.mask) - turns.mask[::-1].index(True)
    return Example(turns.tokens[:length], turns.mask[:length])


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
    same = len(os.path.commonprefix([before, after]))
    raise Refusal(
        f"{where}: the chat template rewrites earlier text when turn {turn} is added, so what the "
        f"policy would see is ambiguous: {before[same : same + 60]!r} became "
        f"{after[same : same + 60]!r}; use rows with one assistant turn, or another template"
    )


def _special_ids(tokenizer: PreTrainedTokenizerBase) -> set[int]:
    added: dict[int, Any] = getattr(tokenizer, "added_tokens_decoder", {})
    named = {i for i, token in added.items() if getattr(token, "special", False)}
    return named | set(tokenizer.all_special_ids)
