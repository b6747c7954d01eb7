"""Where responses end by strings: at the token that completes one, in either engine.

The strings are looked for in what the response's tokens decode to, special tokens shown, after each
token. What was sampled stays as it was sampled: the token that completed a string is the last.
"""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from spmdrl.config import Config
from spmdrl.data.tokenizer import load_tokenizer
from spmdrl.engine.protocol import Request

_MARGIN = 4  # characters that a window may lack at its begin: half a character, a space


class StopStrings:
    """The responses under way that strings may end.

    Args:
        tokenizer: decodes them; None where no request has such strings.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None):
        self.are_sought = tokenizer is not None
        self._tokenizer = tokenizer
        self._requests: dict[str, Request] = {}
        self._seen: dict[str, int] = {}  # tokens of each that were looked at

    def added(self, request: Request) -> None:
        """Take up a request."""
        if request.stop:
            self._requests[request.key] = request

    def end(self, key: str, tokens: Sequence[int]) -> int | None:
        """Return how many tokens a response has that a string ends; None for one that goes on.

        Args:
            tokens: all that was drawn for the request; more than at the last call.
        """
        request = self._requests.get(key)
        if request is None:
            return None
        begun = request.prompt[len(request.prompt) - request.num_begun :]
        whole = [*begun, *tokens]
        for count in range(self._seen.get(key, 0) + 1, len(tokens) + 1):
            if self._is_complete(whole[: len(begun) + count], request.stop):
                return count
        self._seen[key] = len(tokens)
        return None

    def drop(self, key: str) -> None:
        """Forget a request."""
        self._requests.pop(key, None)
        self._seen.pop(key, None)

    def _is_complete(self, tokens: Sequence[int], strings: Sequence[str]) -> bool:
        assert self._tokenizer is not None
        wanted = max(map(len, strings)) + _MARGIN
        window = wanted
        while True:
            text = self._tokenizer.decode(
                tokens[-window:], skip_special_tokens=False, clean_up_tokenization_spaces=False
            )
            if window >= len(tokens) or len(text) >= wanted:
                return any(string in text for string in strings)
            window *= 2  # some tokens show nothing


def make_stop_strings(cfg: Config) -> StopStrings:
    """Return what finds the strings of a config."""
    return StopStrings(load_tokenizer(cfg) if cfg.sampling.stop else None)
