"""What an environment is: it opens a conversation, and answers one response at a time.

An environment object lives for one episode and is PACKED AFTER EVERY CALL. It travels with each
turn to whichever worker process is free, so that a killed worker costs one episode and nothing
else, any worker can serve any turn, and unfinished episodes go into a checkpoint as bytes. So:

- keep only the episode's own state in attributes: text, numbers, plain containers. No open file,
  socket, lock, thread, generator, lambda or event loop;
- keep what is large and never changes (a corpus, a compiled grammar) out of them: in a module
  variable or behind `functools.cache`, filled by `prepare`;
- do not rely on the identity of objects or on module variables that a turn changed.

Attributes that are plain data (see `plain_state.text_of`) are packed as that. Of other things an
environment says by `save()` what they are in plain data, and takes it up by `restore(saved)`. Where
it does neither it is pickled, and a resume refuses pickles that it is not told to trust.

What does not pickle either is refused, with the attribute's name: at start if the constructor puts
it there, else as a failure of its episode.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

from spmdrl.errors import Refusal

Message = dict[str, Any]
"""{"role": ..., "content": text}, and what else the chat template knows (`name`, ...). To a model
that sees, content may be a list of parts, texts and images; see `image_part`."""


@dataclass(frozen=True)
class ToolCall:
    """One call that the policy wrote."""

    name: str
    """Empty when it could not be read."""
    arguments: dict[str, Any]
    error: str = ""
    """Why it cannot be read; empty for a call that can."""


@dataclass(frozen=True)
class Response:
    """What the policy sampled in one turn."""

    text: str
    """Decoded, special tokens left out."""
    tool_calls: tuple[ToolCall, ...] = ()
    """Read from the text by the run's tool-call parser, in order; malformed ones included."""
    is_truncated: bool = False
    """Cut at a length limit: no further turn of the policy follows, whatever is answered."""


@dataclass(frozen=True)
class Turn:
    """An environment's answer to one response."""

    messages: list[Message] = field(default_factory=list)
    """To append before the policy goes on: user or tool messages, at least one. Of a turn that
    is done nobody would read them, and they are dropped."""
    is_done: bool = False
    reward: float = 0.0
    """Added to the episode's reward."""
    info: dict[str, float] = field(default_factory=dict)
    """Numbers that become metrics."""


class Environment(Protocol):
    """One episode. Made by calling the class (or a function) with the run's options; `reset`
    comes once, then `step` until a turn is done. Both may be `async`; each call then runs in an
    event loop of its own.

    Optional: `prepare()`, called once per worker before any deadline runs, for slow imports and
    files to read; `tools`, a list of tool descriptions for the chat template, the same for all
    episodes; `tool_parser`, which format of tool calls to read (see `tool_calls`; `auto` if there
    are tools, else none); `state()`, a text that names the state the episode is
    in, the same wherever nothing that matters differs (the advantage `gigpo` compares turns that
    answer one state); `save()` and `restore(saved)`, which give the episode's state as plain data
    and take it up in an environment newly made; `is_graded`, whether the grader of a generated task
    scores the last response (default False: the task then only makes the rows; what
    rewards.functions names always scores it).
    """

    def reset(self, row: dict) -> list[Message]:
        """Open the conversation. With a parameter `seed` it is also given the episode's seed,
        a 63-bit integer that is the same in a resumed run.

        Args:
            row: the data row, see `data.rows`.
        Returns: messages up to the policy's first turn; may be the row's own prompt, see
            `opening_messages`.
        """

    def step(self, response: Response) -> Turn:
        """Answer a response. A truncated one should end the episode: it cannot go on."""


def opening_messages(row: dict) -> list[Message]:
    """Return a row's own prompt as messages, which hold the images of the row.

    Raises: Refusal when the row has none.
    """
    from spmdrl.data.attachments import inline_images, json_messages, row_images
    from spmdrl.data.rows import prompt_of

    prompt = prompt_of(row)
    if not prompt:
        raise Refusal(f"the row has no prompt; it has {', '.join(map(str, row))}")
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    return json_messages(inline_images(messages, row_images(row, where="the row"), where="the row"))


def image_part(data: bytes) -> dict[str, str]:
    """Return a part of a message's content that shows an image, given by the bytes of its file.

    For the content of a user or tool message, beside parts `{"type": "text", "text": ...}`.
    """
    from spmdrl.data.attachments import as_data_uri

    return {"type": "image", "image": as_data_uri(data)}


def check_at_least(least: int, **values: int) -> None:
    """Raise Refusal for an option below what makes sense."""
    for name, value in values.items():
        if value < least:
            raise Refusal(f"{name}: must be at least {least}, got {value}")
