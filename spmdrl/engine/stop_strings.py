"""Stop strings, the same in either engine: a response ends at the token that completes one.

After each token the response is decoded, with special tokens, and searched. No sampled token is
taken back: the token that completes a string is the response's last.
"""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from spmdrl.config import Config
from spmdrl.data.tokenizer import load_tokenizer
from spmdrl.engine.protocol import Request

_MARGIN = 4  # characters that a window may lose at its start: half a character, a space


class StopStrings:
    """The unfinished responses that strings may end.

    Args:
        tokenizer: decodes them; None where no request has such strings.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None):
        self.are_sought = tokenizer is not None
        self._tokenizer = tokenizer
        self._requests: dict[str, Request] = {}
        self._searched: dict[str, int] = {}  # {request: how many of its tokens were searched}

    def add(self, request: Request) -> None:
        """Start to watch a request."""
        if request.stop:
            self._requests[request.key] = request

    def end(self, key: str, tokens: Sequence[int]) -> int | None:
        """Return the length of a response that a string ends; None where none does.

        Args:
            tokens: all that was drawn for the request; more than at the last call.
        """
        request = self._requests.get(key)
        if request is None:
            return None
        begun = request.prompt[len(request.prompt) - request.num_begun :]
        response = [*begun, *tokens]
        for count in range(self._searched.get(key, 0) + 1, len(tokens) + 1):
            if self._is_complete(response[: len(begun) + count], request.stop):
                return count
        self._searched[key] = len(tokens)
        return None

    def drop(self, key: str) -> None:
        """Forget a request."""
        self._requests.pop(key, None)
        self._searched.pop(key, None)

    def _is_complete(self, tokens: Sequence[int], strings: Sequence[str]) -> bool:
        assert self._tokenizer is not None
        num_chars = max(map(len, strings)) + _MARGIN
        window = num_chars
        while True:
            text = self._tokenizer.decode(
                tokens[-window:], skip_special_tokens=False, clean_up_tokenization_spaces=False
            )
            if window >= len(tokens) or len(text) >= num_chars:
                return any(string in text for string in strings)
            window *= 2  # some tokens decode to nothing


def make_stop_strings(cfg: Config) -> StopStrings:
    """Return the stop strings of a config; requests to the gateway may have their own."""
    has_gateway = cfg.rollout.has_agent or cfg.rewards.judge.is_on or cfg.rollout.serve
    return StopStrings(load_tokenizer(cfg) if cfg.sampling.stop or has_gateway else None)
