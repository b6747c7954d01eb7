"""A row's own sampling settings, in the column that sampling.column names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from spmdrl.config import Config
from spmdrl.errors import Refusal
from spmdrl.imports import nearest

_KNOWN = ("max_tokens", "top_p", "top_k", "min_p")
# Trainers score a whole batch with one value of each of these.
_COMMON = (
    "temperature",
    "stop",
    "stop_token_ids",
    "logit_bias",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
)


def row_sampling(row: Mapping[str, Any], cfg: Config, *, where: str) -> dict[str, Any]:
    """Return the settings of a row: some of max_tokens, top_p, top_k and min_p; {} for none.

    Args:
        where: origin of the row, for messages.
    Raises: Refusal for a value that is no mapping, for unknown names and values out of range, and
        for max_tokens with rewards.shaping.overlong_tokens, which needs one limit for all rows.
    """
    column = cfg.sampling.column
    value = row.get(column) if column else None
    if value is None:
        return {}
    place = f"{where}: column {column}"
    if not isinstance(value, Mapping):
        raise Refusal(f"{place}: must be a mapping such as {{top_p: 0.9}}, got {value!r:.80}")
    settings = {name: own for name, own in value.items() if own is not None}  # null in parquet
    for name, own in settings.items():
        if name in _COMMON:
            raise Refusal(
                f"{place}: {name} is the same for all rows, so that a batch is scored alike; set "
                f"sampling.{name} instead"
            )
        if name not in _KNOWN:
            raise Refusal(f"{place}: {name!r} is not known{nearest(str(name), _KNOWN)}")
        if problem := _problem(name, own, cfg):
            raise Refusal(f"{place}: {name} {problem}, got {own!r}")
    return settings


def _problem(name: str, value: Any, cfg: Config) -> str:
    """Return what is wrong with a value; empty if nothing is."""
    if name == "max_tokens":
        most = cfg.sampling.max_response_tokens
        if type(value) is not int or not 1 <= value <= most:
            return f"must be a whole number from 1 to {most} (sampling.max_response_tokens)"
        if cfg.rewards.shaping.overlong_tokens:
            return "does not go with rewards.shaping.overlong_tokens, which counts from one limit"
        return ""
    if name == "top_k":
        most = 2**31 - 1
        is_valid = type(value) is int and 0 <= value <= most
        return "" if is_valid else f"must be a whole number from 0 to {most}"
    is_valid = type(value) in (int, float) and 0 <= value <= 1
    if name == "top_p":
        return "" if is_valid and value > 0 else "must be in (0, 1]"
    if is_valid and value and cfg.engine.draft_tokens:
        return (
            "does not go with engine.options.speculative_config: vLLM does not apply it to draft "
            "tokens"
        )
    return "" if is_valid else "must be in [0, 1]"
