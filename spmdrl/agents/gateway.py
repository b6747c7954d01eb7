"""The leader's side of the gateway: a process that serves OpenAI's protocol to agents."""

from __future__ import annotations

from spmdrl.agents.messages import Answer, Ask
from spmdrl.config import Config


class Gateway:
    """The gateway process of one engine replica. Not thread-safe.

    Args:
        cfg: its model.*, data.*, sampling.* and rollout.* are used.
    """

    def __init__(self, cfg: Config):
        self._cfg = cfg
        self.address = ""
        """`http://127.0.0.1:PORT/v1`, after `start`."""

    def start(self) -> None:
        """Start the process and wait until it serves.

        Raises: Refusal if the tokenizer or its chat template cannot be used; RuntimeError if the
            process ends or takes too long.
        """
        raise NotImplementedError

    def open(self, episode: str) -> str:
        """Begin an episode, or begin it again from nothing.

        Args:
            episode: `Episode.key`.
        Returns: the API key with which its agent calls.
        """
        raise NotImplementedError

    def poll(self) -> list[Ask]:
        """Return the requests that have arrived, in order, without waiting.

        Raises: RuntimeError if the process has ended.
        """
        raise NotImplementedError

    def answer(self, answer: Answer) -> None:
        """Send an answer. Those to episodes that have ended are dropped."""
        raise NotImplementedError

    def end(self, episode: str) -> None:
        """End an episode: requests with its key are refused from now on (HTTP status 401)."""
        raise NotImplementedError

    def fileno(self) -> int:
        """Return the descriptor that is readable when there may be something to poll."""
        raise NotImplementedError

    def close(self) -> None:
        """End the process."""
        raise NotImplementedError
