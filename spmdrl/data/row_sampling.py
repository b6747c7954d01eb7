"""What a row says of its own sampling, in the column that sampling.column names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from spmdrl.config import Config
from spmdrl.errors import Refusal
from spmdrl.imports import nearest

_ALIKE = "is the same for all rows, so that a batch is scored alike; set sampling.{0} instead"
_KNOWN = ("max_tokens", "top_p", "top_k", "min_p")
_COMMON = (
    *("temperature", "stop", "stop_token_ids", "logit_bias"),
    *("repetition_penalty", "presence_penalty", "frequency_penalty"),
)


def row_sampling(row: Mapping[str, Any], cfg: Config, *, where: str) -> dict[str, Any]:
    """Return what a row sets: some of max_tokens, top_p, top_k and min_p; {} for nothing.

    Args:
        where: origin of the row, for messages.
    Raises: Refusal for what is no mapping, names and values that cannot be, and max_tokens where
        the shaping of rewards counts from the limit of all.
    """
    column = cfg.sampling.column
    value = row.get(column) if column else None
    if value is None:
        return {}
    place = f"{where}: column {column}"
    if not isinstance(value, Mapping):
        raise Refusal(f"{place}: must be a mapping such as {{top_p: 0.9}}, got {value!r:.80}")
    found = {name: own for name, own in value.items() if own is not None}  # parquet's empty fields
    for name, own in found.items():
        if name in _COMMON:
            raise Refusal(f"{place}: {name} {_ALIKE.format(name)}")
        if name not in _KNOWN:
            raise Refusal(f"{place}: {name!r} is not known{nearest(str(name), _KNOWN)}")
        if problem := _problem(name, own, cfg):
            raise Refusal(f"{place}: {name} {problem}, got {own!r}")
    return found


def _problem(name: str, value: Any, cfg: Config) -> str:
    """Return what is wrong with a value, empty if nothing is."""
    most = cfg.sampling.max_response_tokens
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if name in ("max_tokens", "top_k"):
        low, high = (1, most) if name == "max_tokens" else (0, 2**31 - 1)
        if not isinstance(value, int) or not is_number or not low <= value <= high:
            end = " (sampling.max_response_tokens)" if name == "max_tokens" else ""
            return f"must be a whole number from {low} to {high}{end}"
        if name == "max_tokens" and cfg.rewards.shaping.overlong_tokens:
            return "does not go with rewards.shaping.overlong_tokens, which counts from one limit"
        return ""
    is_inside = is_number and (0 < value <= 1 if name == "top_p" else 0 <= value <= 1)
    ends = "(0, 1]" if name == "top_p" else "[0, 1]"
    return "" if is_inside else f"must be in {ends}"
