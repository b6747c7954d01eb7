"""A supervised row as token ids, a mask of those to imitate, and what they show."""

from __future__ import annotations

import functools
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
    """Of those to imitate."""

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

    `prompt` with `completion` (or `answer`) trains the completion and the token that ends it;
    `messages` trains every assistant turn up to its end-of-turn token; `text` trains all but
    the first token, which nothing predicts.

    Args:
        row: see the module `rows`.
        template: `auto`, `always` or `never`; see data.chat_template.
        where: origin of the row, for error messages.
        files: where attachments of the row are; by default in itself.
    Returns: tokens [T] and response_mask [T]; the last token is trained.
    Raises: Refusal when the row cannot be rendered or nothing in it is to be trained.
    """
    prompt = row.get("prompt")
    held = row_images(row, where=where)
    encoder = MultimodalEncoder(tokenizer, files=files or ImageFiles(), where=where)
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
            return _plain_example(prompt, completion, held, encoder)
        context = _as_messages(prompt, role="user")
        talk = context + _as_messages(completion, role="assistant")
        talk = inline_images(talk, held, where=where)
        return _encode_conversation(talk, encoder, show=show, first=len(context))
    if row.get("messages"):
        talk = inline_images(row["messages"], held, where=where)
        return _encode_conversation(talk, encoder, show=show, first=0)
    return _text_example(row["text"], held, encoder)


def _plain_example(
    prompt: str, completion: str, held: Sequence[Any], encoder: MultimodalEncoder
) -> Example:
    given, _ = encoder.encode_plain(prompt, held)
    whole, _ = encoder.encode_plain(prompt, held, end=completion)
    added = whole[len(given) :]
    if whole[: len(given)] != given:  # see _Turns.add
        added = TokenIds(encoder.tokenizer(completion, add_special_tokens=False)["input_ids"])
    added = _closed(added, encoder.tokenizer, where=encoder.where)
    return Example(given + added, [False] * len(given) + [True] * len(added))


def _text_example(text: str, held: Sequence[Any], encoder: MultimodalEncoder) -> Example:
    begun, _ = encoder.encode_plain(text, held)
    tokens = _closed(begun, encoder.tokenizer, where=encoder.where)
    if len(tokens) < 2:
        raise Refusal(f"{encoder.where}: the text {text!r:.40} has no tokens to imitate")
    # What stands for an attachment is given: nobody writes it.
    mask = [not is_placeholder for is_placeholder in tokens.are_placeholders]
    return Example(tokens, [False, *mask[1:]])


def _as_messages(value: str | Messages, *, role: str) -> Messages:
    return list(value) if isinstance(value, list) else [{"role": role, "content": value}]


def _closed(tokens: TokenIds, tokenizer: PreTrainedTokenizerBase, *, where: str) -> TokenIds:
    if tokenizer.eos_token_id is None:
        raise Refusal(f"{where}: plain text ends with eos, and the tokenizer has none")
    if tokens and tokens[-1] == tokenizer.eos_token_id:
        return tokens
    return tokens + [tokenizer.eos_token_id]


class _Turns:
    """The ids of a conversation that is rendered turn by turn, and what they show.

    Args:
        held: attachments of the conversation, in order.
    """

    def __init__(self, encoder: MultimodalEncoder, held: Sequence[Any]):
        self._encoder = encoder
        self._opened = encoder.open(held)
        self.tokens = TokenIds()
        self.mask: list[bool] = []

    def add(self, whole: str, piece: str) -> TokenIds:
        """Append the ids that a text adds to those so far, unmasked, and return them.

        Args:
            whole: the conversation up to here, of which `piece` is the end.
        """
        before = len(self.tokens)
        end = self._encoder.count_placeholders(whole)
        ids = self._encoder.encode_opened(whole, self._opened[:end])
        if [*ids[:before]] == [*self.tokens]:
            ids = ids[before:]
        else:
            # A token of the whole text straddles the border. The policy never sees that one,
            # because its prompt is tokenised alone: so is what follows.
            own = self._opened[end - self._encoder.count_placeholders(piece) : end]
            ids = self._encoder.encode_opened(piece, own)
        self.tokens += ids
        self.mask += [False] * len(ids)
        return ids


def _encode_conversation(
    messages: Messages, encoder: MultimodalEncoder, *, show: Callable[..., str], first: int
) -> Example:
    bare, held = split_images(messages)
    ends = _special_ids(encoder.tokenizer)
    where = encoder.where
    turns = _Turns(encoder, held)
    done = ""
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
