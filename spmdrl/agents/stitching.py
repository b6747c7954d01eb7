"""Find the earlier answer that a request continues.

The answers of an episode are known by the conversation that led to each. A request continues the
longest one whose conversation, with the answer itself, is the beginning of the request's. Its ids
then stay as they were sampled, and only the messages after it become new ids. What an agent
changes, leaves out or sums up matches no answer from there on, so it begins a branch or a trace.

Clients change messages without changing what they say: they leave reasoning out, write null for an
empty text, or order keys differently. `requests.normal_message` makes such messages equal, and the
reasoning of an earlier answer may be missing. It may not differ.
"""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from spmdrl.environments.protocol import Message

_REASONING = "reasoning_content"


@dataclass(eq=False)
class KnownAnswer:
    """An answer that requests may continue."""

    node: int
    """Its number, as the leader gave it."""
    num_tokens: int
    """Tokens of its path: all up to its last sampled one."""
    sampled: tuple[int, ...]
    """Its own ids, the end of the path."""
    is_continued: bool = False
    """Whether a request has continued it."""


@dataclass(frozen=True, eq=False)
class _Entry:
    """An answer and the reasoning in the conversation that led to it."""

    answer: KnownAnswer
    reasonings: tuple[str, ...]
    """Of each message, with the answer itself; empty for none."""


class EpisodeHistory:
    """The answers of one episode.

    Args:
        continues: whether requests may continue answers; otherwise none is kept.
    """

    def __init__(self, *, continues: bool = True) -> None:
        self._continues = continues
        self._chats: dict[bytes, list[_Entry]] = defaultdict(list)
        self._texts: list[tuple[str | tuple[int, ...], KnownAnswer]] = []

    def add_chat(self, messages: Sequence[Message], tools: list[dict], answer: KnownAnswer) -> None:
        """Add an answer to messages.

        Args:
            messages: the conversation with the answer as its last message, in normal form.
            tools: of the request.
        """
        if not self._continues:
            return
        digest = list(_digests(messages, tools))[-1]
        self._chats[digest].append(_Entry(answer, _reasonings(messages)))

    def find_chat(
        self, messages: Sequence[Message], tools: list[dict]
    ) -> tuple[KnownAnswer | None, int]:
        """Return the answer that a request continues, and how many messages that covers.

        Of several answers with the same text, one that no request has continued comes first.

        Returns: None and 0 if the request begins a trace.
        """
        reasonings = _reasonings(messages)
        digests = list(_digests(messages, tools))
        for count in range(len(messages) - 1, 0, -1):  # at least one message must be new
            found = [
                entry.answer
                for entry in self._chats.get(digests[count - 1], ())
                if _agree(reasonings, entry.reasonings)
            ]
            if found:
                return _first(found), count
        return None, 0

    def add_text(self, whole: str | tuple[int, ...], answer: KnownAnswer) -> None:
        """Add an answer to a text, or to ids.

        Args:
            whole: the prompt and the answer.
        """
        if self._continues:
            self._texts.append((whole, answer))

    def find_text(self, prompt: str | tuple[int, ...]) -> tuple[KnownAnswer | None, int]:
        """Return the answer that a prompt continues, and how much of the prompt that covers:
        characters of a text, else ids."""
        matches = [
            (len(whole), answer)
            for whole, answer in self._texts
            if type(whole) is type(prompt) and prompt[: len(whole)] == whole
        ]
        longest = max((size for size, _ in matches), default=0)
        if not longest:
            return None, 0
        return _first([answer for size, answer in matches if size == longest]), longest


def _first(answers: Sequence[KnownAnswer]) -> KnownAnswer:
    """Return the first answer that is not continued, else the first; it now is."""
    first = next((answer for answer in answers if not answer.is_continued), answers[0])
    first.is_continued = True
    return first


def _digests(messages: Sequence[Message], tools: list[dict]) -> Iterator[bytes]:
    """Yield for each message a digest of the conversation up to it, without reasoning."""
    digest = _digest(b"", tools)
    for message in messages:
        bare = {key: value for key, value in message.items() if key != _REASONING}
        digest = _digest(digest, bare)
        yield digest


def _digest(before: bytes, value: object) -> bytes:
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(before + text.encode()).digest()


def _reasonings(messages: Sequence[Message]) -> tuple[str, ...]:
    return tuple(message.get(_REASONING, "") for message in messages)


def _agree(given: Sequence[str], known: Sequence[str]) -> bool:
    """Return whether a request leaves out or repeats the reasoning of each message."""
    return all(own in ("", other) for own, other in zip(given, known))
