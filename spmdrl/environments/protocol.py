"""The interface of environments. An environment opens a conversation and answers the responses.

An environment object lives for one episode and is PACKED AFTER EVERY CALL. Any free worker process
gets the next turn, so that a killed worker costs one episode only. Checkpoints hold unfinished
episodes as bytes. So:

- keep only the episode's own state in attributes: text, numbers, plain containers. No open file,
  socket, lock, thread, generator, lambda or event loop;
- keep large data that never changes (a corpus, a compiled grammar) out of attributes: in a module
  variable or a `functools.cache`, which `prepare` fills;
- do not rely on the identity of objects or on module variables that a turn changed.

Attributes that are plain data (see `plain_state.text_of`) are packed as JSON. For other attributes
an environment may have `save()`, which returns plain data, and `restore(saved)`, which takes it
back. Without these it is pickled, and a resume loads pickles only if it is set to trust them.

An attribute that cannot be pickled is refused by name: at start if the constructor sets it. If a
later call sets it, the episode fails.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

from spmdrl.errors import Refusal

Message = dict[str, Any]
"""{"role": ..., "content": text}, and other keys that the chat template knows (`name`, ...). For a
model that reads images, content may be a list of texts and images; see `image_part`."""


@dataclass(frozen=True)
class ToolCall:
    """One call that the policy wrote."""

    name: str
    """Empty if the call could not be read."""
    arguments: dict[str, Any]
    error: str = ""
    """Why the call could not be read; empty if it was."""


@dataclass(frozen=True)
class Response:
    """One turn of the policy."""

    text: str
    """The turn's tokens, decoded without special tokens."""
    tool_calls: tuple[ToolCall, ...] = ()
    """Calls that the run's parser read from the text, in order, including malformed ones."""
    is_truncated: bool = False
    """Whether the turn was cut at a length limit. If so, the policy gets no other turn."""


@dataclass(frozen=True)
class Turn:
    """An environment's answer to one response."""

    messages: list[Message] = field(default_factory=list)
    """User or tool messages to append before the policy's next turn, at least one. If `is_done`,
    they are dropped."""
    is_done: bool = False
    reward: float = 0.0
    """Added to the episode's reward."""
    info: dict[str, float] = field(default_factory=dict)
    """Numbers that become metrics."""


class Environment(Protocol):
    """One episode. The run calls the class (or a function) with its options, then `reset` once,
    then `step` until a turn is done. Both may be `async`; each call then runs in an event loop of
    its own.

    Optional members:

    - `prepare()` is called once per worker before any deadline runs, for slow imports and files;
    - `tools` is a list of tool descriptions for the chat template, the same for all episodes;
    - `tool_parser` names the format of tool calls (see `tool_calls`; by default `auto` if there are
      tools, else none);
    - `state()` returns a text that names the state of the episode, equal for states that do not
      differ in what matters: the advantage `gigpo` compares turns that answer one state;
    - `save()` returns the episode's state as plain data, and `restore(saved)` sets it in a new
      environment;
    - `is_graded` says whether the grader of a generated task scores the last response. The default
      is False: the task only makes the rows. rewards.functions always score the last response.
    """

    def reset(self, row: dict) -> list[Message]:
        """Open the conversation.

        With a parameter `seed` it also gets the episode's seed, a 63-bit integer that is the same
        in a resumed run.

        Args:
            row: the data row, see `data.rows`.
        Returns: messages up to the policy's first turn; often the row's own prompt, see
            `opening_messages`.
        """

    def step(self, response: Response) -> Turn:
        """Answer a response. A truncated response should end the episode, since it cannot
        continue."""


def opening_messages(row: dict) -> list[Message]:
    """Return a row's prompt as messages, with the images of the row.

    Raises: Refusal if the row has no prompt.
    """
    from spmdrl.data.attachments import inline_images, json_messages, row_images
    from spmdrl.data.rows import prompt_of

    prompt = prompt_of(row)
    if not prompt:
        raise Refusal(f"the row has no prompt; it has {', '.join(map(str, row))}")
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    return json_messages(inline_images(messages, row_images(row, where="the row"), where="the row"))


def image_part(data: bytes) -> dict[str, str]:
    """Return a part of a message's content that is an image, from the bytes of its file.

    User and tool messages may have such parts. Their other parts are `{"type": "text", "text":
    ...}`.
    """
    from spmdrl.data.attachments import as_data_uri

    return {"type": "image", "image": as_data_uri(data)}


def check_at_least(least: int, **values: int) -> None:
    """Raise Refusal for an option below its smallest value."""
    for name, value in values.items():
        if value < least:
            raise Refusal(f"{name}: must be at least {least}, got {value}")
