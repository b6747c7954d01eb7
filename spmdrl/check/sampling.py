"""Whether texts and ids that end responses, or change logits, can do so."""

from __future__ import annotations

import re
from collections.abc import Iterator

from spmdrl.config.fields import Config

_LONGEST_STOP = 256
_ESCAPES = re.compile(r"(\\[nrt])+")
_MOST_BIAS = 100  # what vLLM clamps to


def sampling_problems(cfg: Config) -> list[str]:
    """Return what is wrong with sampling, each as `field: what, value seen, what to do`."""
    if not cfg.objective.samples:
        return []
    found = (*_stop_problems(cfg), *_bias_problems(cfg))
    return [f"sampling.{problem}" for problem in found]


def _stop_problems(cfg: Config) -> Iterator[str]:
    for string in cfg.sampling.stop:
        if not 0 < len(string) <= _LONGEST_STOP or "\N{REPLACEMENT CHARACTER}" in string:
            yield (
                f"stop: {string[:40]!r} cannot end a response; take a text of 1 to {_LONGEST_STOP} "
                "characters, without U+FFFD, which stands for what is no character"
            )
        elif _ESCAPES.fullmatch(string):
            yield (
                f"stop: {string!r} is a backslash and a letter, which no response ends with; for "
                "the character itself write $'...' in a shell, and double quotes in YAML"
            )


def _bias_problems(cfg: Config) -> Iterator[str]:
    for token, added in cfg.sampling.logit_bias.items():
        if not (token.isascii() and token.isdigit()) or str(int(token)) != token:
            yield f"logit_bias: {token!r} is no id of a token; write the id as text, as in '271'"
        elif isinstance(added, (bool, str)) or not -_MOST_BIAS <= added <= _MOST_BIAS:
            yield (
                f"logit_bias.{token}: must be a number in [-{_MOST_BIAS}, {_MOST_BIAS}], got "
                f"{added!r}"
            )


def ids_above(cfg: Config, vocab_size: int) -> list[str]:
    """Return which ids of sampling.logit_bias and sampling.stop_token_ids a model of so many does
    not have."""
    asked = {
        "sampling.logit_bias": [int(token) for token in cfg.sampling.logit_bias],
        "sampling.stop_token_ids": cfg.sampling.stop_token_ids,
    }
    return [
        f"{field}: {token} is no id of this model, which has 0 to {vocab_size - 1}"
        for field, tokens in asked.items()
        for token in tokens
        if token >= vocab_size and cfg.objective.samples
    ]
