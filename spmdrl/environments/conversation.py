"""Conversations as token ids. Each id is computed once.

Sampled ids are never changed. The environment's messages are tokenized once and appended. So the
policy is trained on the ids that it saw and wrote, and each turn begins with all ids of the turn
before, which the engine has cached.

The chat template decides how turns are joined. It renders a small stand-in conversation: a user
turn, a reply, the new messages. The text that it puts after the reply is tokenized and appended to
the sampled ids. Three rules follow:

1. A reply that ends with a stop token is closed by that token. Any other reply (cut at the length
   limit, or stopped by a string) gets the template's own closing.
2. Sampled ids stay, even if the template would trim the reply.
3. Some templates rewrite earlier turns: Qwen 3's and others drop the reasoning of all turns but
   the last, Mistral's moves the tools to the last user turn. The model would then read other
   tokens than those sampled. If the template only drops reasoning, the conversation keeps the
   sampled tokens, and the log says so. Any other rewriting is refused at start, unless the
   environment's options have `rewrites: keep`, which keeps the sampled tokens too.
"""

from __future__ import annotations

import copy
import functools
import os
import re
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Literal

from transformers import PreTrainedTokenizerBase

from spmdrl.data.attachments import ImageFiles, MultimodalEncoder, inline_images, split_images
from spmdrl.data.templates import apply_template, render
from spmdrl.environments.protocol import Message, Response, ToolCall
from spmdrl.environments.tool_calls import Parser
from spmdrl.errors import Refusal
from spmdrl.model_inputs import TokenIds

_REPLY = "spmdrl-stands-for-the-reply"
_REASONING = re.compile(r"<think>.*?</think>\s*", re.DOTALL)
_MESSAGE_CHARS = 60
_CACHED_OPENINGS = 256
_KEEP = (
    "Set {rewrites: keep} among the environment's options to keep the sampled tokens (but later "
    "users of the model give it other tokens with this template), or use a tokenizer whose "
    "template does not change earlier turns"
)


class Chat:
    """Turns messages into ids to append, and sampled ids into responses.

    Args:
        tokenizer: has a chat template.
        stop_token_ids: ids that end a response in the engine.
        tools: descriptions of the tools, for the template.
        parser: reads tool calls; None if there are no tools.
        rewrites: how to treat a template that changes earlier turns; see the module's docstring.
        prefix: text that each turn of the policy begins with; it is not sampled.
        field: field of the config that names the environment; used in messages.
        files: reads the attachments of messages; see `with_files`.
    Raises (on construction): Refusal if there is no template, if the template ignores the tools,
        if the token by which it closes a reply does not stop the engine, or if it rewrites earlier
        turns; the message shows the rewritten text.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        stop_token_ids: Collection[int],
        tools: list[dict] | None = None,
        parser: Parser | None = None,
        rewrites: Literal["auto", "refuse", "keep"] = "auto",
        prefix: str = "",
        field: str = "rollout.environment",
        files: ImageFiles | None = None,
    ):
        self._prefix = prefix
        self._where = field
        self._files = files or ImageFiles()
        self.tokenizer = tokenizer
        self.tools = tools or None
        self._parser = parser
        self._stops = frozenset(stop_token_ids)
        # All samples of a group have the same opening, and openings are the longest texts.
        self._encoded_opening = functools.lru_cache(maxsize=_CACHED_OPENINGS)(
            self._encode_with_images
        )
        self._check_tools()
        self._check_closing()
        kinds = _probes(has_tools=bool(tools))
        for messages in kinds:
            advice = (
                "A template without tool messages takes the environment `tools` with "
                "reply_role=user"
            )
            with _explain_refusal(f"a reply answered by {_roles(messages)}. {advice}"):
                self._text_between(messages)
        self.drops_reasoning = False
        """Whether the template drops the reasoning of earlier turns. The conversation keeps it."""
        if rewrites != "keep":
            for head in self._heads():
                for messages in kinds:
                    self._check_rewriting(head, messages, may_drop=rewrites == "auto")

    def with_files(self, files: ImageFiles) -> Chat:
        """Return a copy that reads attachments from these files."""
        own = copy.copy(self)
        own._files = files
        return own

    def encode_opening(self, messages: list[Message]) -> TokenIds:
        """Return the ids of a conversation's first messages and of the head of the policy's turn.

        A final assistant message is not closed: the policy continues it.
        Raises: Refusal if the template refuses the messages or an attachment cannot be used.
        """
        bare, held = split_images(inline_images(messages, (), where=self._where))
        text = self._opening_text(bare)
        return self._encode_with_images(text, held) if held else self._encoded_opening(text)

    def encode_answer(self, sampled: Sequence[int], messages: list[Message]) -> TokenIds:
        """Return the ids to append to the policy's turn, up to its next turn.

        Args:
            sampled: ids of the turn, as the engine returned them.
            messages: the environment's answer.
        Raises: Refusal if the template refuses the messages or an attachment cannot be used.
        """
        bare, held = split_images(inline_images(messages, (), where=self._where))
        tokens = self._encode_with_images(self._text_between(bare), held)
        # The template's closing begins with a stop token, see `_check_closing`. Leave it out if
        # the policy has sampled one itself.
        return tokens[1:] if sampled and sampled[-1] in self._stops else tokens

    def decode_turns(
        self, turns: Sequence[Sequence[int]], *, are_truncated: Sequence[bool]
    ) -> list[Response]:
        """Convert the sampled ids of finished turns into the responses that environments get."""
        bodies = [t[:-1] if t and t[-1] in self._stops else t for t in turns]
        texts = self.tokenizer.batch_decode(bodies, skip_special_tokens=True)
        calls: list[tuple[ToolCall, ...]] = [()] * len(texts)
        if self._parser is not None:  # some vocabularies mark a call with special tokens
            marked = self.tokenizer.batch_decode(bodies, skip_special_tokens=False)
            calls = [self._parser(raw) for raw in marked]
        return [Response(*of_turn) for of_turn in zip(texts, calls, are_truncated)]

    # ---------------------------------------------------------------- the template

    def _encode(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def _encode_with_images(self, text: str, held: Sequence[Any] = ()) -> TokenIds:
        return MultimodalEncoder(self.tokenizer, files=self._files, where=self._where).encode(
            text, held
        )

    def _opening_text(self, messages: list[Message]) -> str:
        return render(
            messages, self.tokenizer, tools=self.tools, where=self._where, prefix=self._prefix
        )

    def _render(self, messages: list[Message], **options: Any) -> str:
        return apply_template(messages, self.tokenizer, where=self._where, tools=None, **options)

    def _text_between(self, messages: list[Message]) -> str:
        """Return the text between a reply and the next one, with the reply's closing."""
        text = self._render([*_stand_in(), *messages], add_generation_prompt=True)
        _before, mark, after = text.partition(_REPLY)
        if not mark:
            raise Refusal(
                f"{self._where}: the chat template leaves a reply out if {_roles(messages)} "
                "follow, so that no tokens can be appended to the reply"
            )
        return after + self._prefix

    def _check_tools(self) -> None:
        """Refuse a template that ignores the descriptions of the tools."""
        opening = [{"role": "user", "content": "begin"}]
        own = (
            render(opening, self.tokenizer, tools=t, where=self._where) for t in (self.tools, None)
        )
        if self.tools and len({*own}) == 1:
            names = ", ".join(str(tool.get("function", tool).get("name")) for tool in self.tools)
            raise Refusal(
                f"{self._where}: the chat template of {self.tokenizer.name_or_path or 'the model'} "
                f"knows no tools, so that the policy would not see {names}; set "
                f"{self._where}.reply_role to user, so that the environment `tools` describes them "
                "in the first message (another environment must do so itself), or use a tokenizer "
                "whose template has tools"
            )

    def _check_closing(self) -> None:
        closing = self._render(_stand_in()).partition(_REPLY)[2]
        tokens = self._encode(closing)
        if tokens and tokens[0] in self._stops:
            return
        names = self.tokenizer.convert_ids_to_tokens(sorted(self._stops))
        first = self.tokenizer.convert_ids_to_tokens(tokens[:1]) or ["nothing"]
        raise Refusal(
            f"{self._where}: the chat template closes a reply by "
            f"{closing[:_MESSAGE_CHARS]!r}, whose "
            f"first token {first[0]!r} does not stop the engine (it stops at "
            f"{', '.join(map(repr, names))}); the policy would write the other side's turns too. "
            f"Add it to sampling.stop_token_ids"
            + (f": {tokens[0]}" if tokens else ", or use a chat template that closes replies")
        )

    def _heads(self) -> list[list[Message]]:
        user = [{"role": "user", "content": "begin"}]
        system = [{"role": "system", "content": "rules"}, *user]
        with suppress(Refusal):  # Gemma's template has no system turn; environments send none then
            self._opening_text(system)
            return [user, system]
        return [user]

    def _check_rewriting(
        self, head: list[Message], messages: list[Message], *, may_drop: bool
    ) -> None:
        """Compare a conversation that is joined here with the template's rendering of it."""
        replies = ["first", "<think>\nwhy\n</think>\n\nsecond", "third"]
        if self._prefix.rstrip().endswith("<think>"):
            # The prefix opens the reasoning, and every reply closes it.
            replies = [f"why\n</think>\n\n{text}" for text in ("first", "second", "third")]
        joined = self._opening_text(head)
        whole = list(head)
        for reply in replies:
            joined += reply + self._text_between(messages)
            whole += [{"role": "assistant", "content": self._prefix + reply}, *messages]
        answers = f"a conversation of replies, each answered by {_roles(messages)}. {_KEEP}"
        with _explain_refusal(answers):
            rendered = self._opening_text(whole)
        if may_drop and len(rendered) < len(joined):
            if _REASONING.sub("", joined) == _REASONING.sub("", rendered):
                self.drops_reasoning = True
                return
        if joined != rendered:
            raise Refusal(f"{self._where}: {_difference(joined, rendered, messages)}")


@contextmanager
def _explain_refusal(what: str) -> Iterator[None]:
    """Append to a refusal of the template a description of the messages that it refused."""
    try:
        yield
    except Refusal as error:
        raise Refusal(f"{error}\nThat was {what}") from None


def _probes(*, has_tools: bool) -> list[list[Message]]:
    """Return one example of each kind of answer that an environment may give."""
    user = [{"role": "user", "content": "more"}]
    if not has_tools:
        return [user]
    tool = {"role": "tool", "name": "probe", "content": "more", "tool_call_id": "call00001"}
    return [user, [tool], [tool, dict(tool, tool_call_id="call00002")]]


def _stand_in() -> list[Message]:
    return [{"role": "user", "content": "begin"}, {"role": "assistant", "content": _REPLY}]


def _roles(messages: list[Message]) -> str:
    return " and ".join(f"a {m['role']} message" for m in messages)


def _difference(joined: str, rendered: str, messages: list[Message]) -> str:
    at = len(os.path.commonprefix([joined, rendered]))
    begin = max(0, at - _MESSAGE_CHARS // 2)
    ours, other = (t[begin : at + _MESSAGE_CHARS] for t in (joined, rendered))
    return (
        f"the chat template rewrites earlier turns once {_roles(messages)} follow: "
        f"the text\n  {ours!r}\nbecomes\n  {other!r}\nThe policy would read tokens that it did "
        f"not sample. {_KEEP}"
    )
