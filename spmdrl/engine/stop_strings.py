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
        tokenizer: decodes them.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        self._tokenizer = tokenizer
        self._strings: dict[str, tuple[str, ...]] = {}  # by request
        self._begun: dict[str, list[int]] = {}  # ids of the response that stand in the prompt
        self._seen: dict[str, int] = {}  # tokens looked at

    def added(self, request: Request) -> None:
        """Take up a request."""
        if request.stop:
            begin = len(request.prompt) - request.num_begun
            self._strings[request.key] = request.stop
            self._begun[request.key] = list(request.prompt[begin:])
            self._seen[request.key] = 0

    def end(self, key: str, tokens: Sequence[int]) -> int | None:
        """Return how many tokens a response has that a string ends; None for one that goes on.

        Args:
            tokens: all that was drawn for the request; more than at the last call.
        """
        if key not in self._strings:
            return None
        whole = [*self._begun[key], *tokens]
        begun = len(whole) - len(tokens)
        for count in range(self._seen[key] + 1, len(tokens) + 1):
            if self._is_complete(whole[: begun + count], self._strings[key]):
                return count
        self._seen[key] = len(tokens)
        return None

    def drop(self, key: str) -> None:
        """Forget a request."""
        for held in (self._strings, self._begun, self._seen):
            held.pop(key, None)

    def _is_complete(self, tokens: Sequence[int], strings: Sequence[str]) -> bool:
        wanted = max(map(len, strings)) + _MARGIN
        window = wanted
        while True:
            text = self._tokenizer.decode(
                tokens[-window:], skip_special_tokens=False, clean_up_tokenization_spaces=False
            )
            if window >= len(tokens) or len(text) >= wanted:
                return any(string in text for string in strings)
            window *= 2  # some tokens show nothing


def make_stop_strings(cfg: Config) -> StopStrings | None:
    """Return what finds the strings of a config; None where it has none."""
    return StopStrings(load_tokenizer(cfg)) if cfg.sampling.stop else None
