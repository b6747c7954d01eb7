"""Rows from a JSONL or parquet file or a hub dataset, checked as they are read.

Accepted columns: verl's (`prompt`, `data_source`, `reward_model`, ...), TRL's (`prompt` plus
anything), OpenAI's (`messages`), and for supervised training `prompt` with `completion` or
`answer`, or `text`. For preferences: TRL's `prompt`, `chosen`, `rejected` (`prompt` may be left
out, see `pair_of`; optional `margin`), or `prompt`, `completion`, `label`. Reward workers import
this module, so it imports nothing heavy.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from spmdrl.data.row_files import numbered_rows
from spmdrl.data.row_values import ROW_BYTES, plain_row, rename_columns
from spmdrl.errors import Refusal, describe

Messages = list[dict[str, Any]]
Need = Literal["prompt", "example", "pair", "label"]
_MOST_MARGIN = 10**6


class Rows:
    """Rows in memory, each with its origin."""

    is_held = True
    """Whether all rows are in memory and were checked."""

    def __init__(self, rows: list[dict], *, places: list[str]):
        assert len(rows) == len(places)
        self._rows = rows
        self._places = places

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict:
        return self._rows[index]

    def __iter__(self) -> Iterator[dict]:
        return iter(self._rows)

    def where(self, index: int) -> str:
        """Return the origin of a row for error messages, e.g. `train.jsonl:12`."""
        return self._places[index]


@dataclass(frozen=True)
class RowRules:
    """What a row must hold, and how it is read."""

    need: Need = "prompt"
    """`prompt`: something to generate from. `example`: something to imitate. `pair`: two responses
    to compare. `label`: one response that is marked good or bad."""
    max_bytes: int = ROW_BYTES
    """Of one row, see `plain_row`."""
    columns: Mapping[str, str] = field(default_factory=dict)
    """{name: name in the file} of columns to rename, see `rename_columns`."""

    def check(self, row: Any, *, place: str) -> dict:
        """Return a row as plain data, with its columns renamed.

        Args:
            place: origin of the row, for messages.
        Raises: Refusal when it does not hold what is needed.
        """
        row = plain_row(row, place=place, max_bytes=self.max_bytes)
        row = rename_columns(row, self.columns, place=place)
        _check_row(row, need=self.need, place=place)
        return row


_ANY = RowRules()


def read_rows(spec: str, *, size: int = 0, rules: RowRules = _ANY) -> Rows:
    """Read a dataset into memory; see `checked_rows`."""
    rows = []
    places = []
    for place, row in checked_rows(spec, size=size, rules=rules):
        rows.append(row)
        places.append(place)
    return Rows(rows, places=places)


def checked_rows(spec: str, *, size: int = 0, rules: RowRules = _ANY) -> Iterator[tuple[str, dict]]:
    """Yield each row of a dataset after its origin for messages.

    Args:
        spec: a .jsonl, .json or .parquet file, or a hub dataset, or a folder in the hub's layout,
            as NAME, NAME:SPLIT or NAME:CONFIG:SPLIT (split `train` by default).
        size: rows to take from the start, at most; 0 takes all.
    Raises: Refusal naming file and line (parquet, hub: row) of the first bad row; when the
        file does not exist, cannot be read, or holds no rows.
    """
    place = None
    numbered = numbered_rows(spec, max_bytes=rules.max_bytes)
    for place, row in itertools.islice(numbered, size or None):
        yield place, rules.check(row, place=place)
    if place is None:
        raise Refusal(f"{spec}: the dataset is empty (0 rows); give it at least one")


# --------------------------------------------------------------------------- checking


_COLUMNS: dict[Need, tuple[str, ...]] = {
    "prompt": (),
    "example": ("completion",),
    "pair": ("chosen", "rejected"),
    "label": ("completion",),
}
"""Columns that hold text or messages, like `prompt`."""


def _check_row(row: dict, *, need: Need, place: str) -> None:
    for column in ("prompt", *_COLUMNS[need], "messages"):
        value = row.get(column)
        where = f"{place}: column {column!r}"
        if isinstance(value, list):
            row[column] = _checked_messages(value, place=where)
        elif value is not None and (column == "messages" or not isinstance(value, str)):
            form = "a list of messages" if column == "messages" else "text or a list of messages"
            raise Refusal(f"{where}: expected {form}, got {describe(value)}")
    if not isinstance(row.get("tools"), (list, type(None))):
        raise Refusal(f"{place}: column 'tools': expected a list, got {describe(row['tools'])}")
    if need == "pair":
        pair_of(row, place=place)
    elif need == "label":
        label_of(row, place=place)
    elif need == "example":
        _check_example(row, place=place)
    else:
        _check_prompt(row, place=place)


def _check_example(row: dict, *, place: str) -> None:
    if _is_text(row, place=place) or has_target(row, place=place):
        return
    raise Refusal(
        f"{place}: the row has nothing to imitate; supervised rows have `messages` with an "
        "assistant turn, `prompt` with `completion` or `answer`, or `text`; this one has "
        f"columns {_columns(row)}"
    )


def _check_prompt(row: dict, *, place: str) -> None:
    if prompt_of(row):
        return
    if "messages" in row and not row.get("prompt"):
        raise Refusal(f"{place}: `messages` holds no turn before the final assistant turn")
    hint = ""
    texts = [name for name, value in row.items() if isinstance(value, (str, list)) and value]
    if "prompt" in row:
        hint = f" and prompt {describe(row['prompt'])}"
    elif texts:
        hint = f"; if {texts[0]} is the prompt, set --data.columns '{{prompt: {texts[0]}}}'"
    raise Refusal(
        f"{place}: the row has no prompt; it needs a non-empty column `prompt` (text or a list of "
        f"messages) or `messages`; it has columns {_columns(row)}{hint}"
    )


def _columns(row: dict) -> str:
    return ", ".join(map(str, row)) or "(none)"


def _checked_messages(messages: list, *, place: str) -> Messages:
    checked = []
    for i, message in enumerate(messages):
        is_valid = (
            isinstance(message, dict)
            and isinstance(message.get("role"), str)
            and (isinstance(message.get("content"), (str, list)) or message.get("tool_calls"))
        )
        if not is_valid:
            raise Refusal(
                f"{place}: message {i} must have a `role` and a `content` (text), got "
                f"{message!r:.100}"
            )
        # Parquet adds the fields of other messages as nulls, and templates test for fields.
        empty = [key for key, value in message.items() if value is None and key != "content"]
        checked.append({key: value for key, value in message.items() if key not in empty})
    return checked


# --------------------------------------------------------------------------- reading columns


def prompt_of(row: dict) -> str | Messages:
    """Return what to generate from: `prompt`, else `messages` without a final assistant turn, else
    an empty text."""
    if row.get("prompt"):
        return row["prompt"]
    messages = list(row.get("messages") or [])
    if messages and messages[-1]["role"] == "assistant":
        messages.pop()
    return messages or ""


def _is_text(row: dict, *, place: str) -> bool:
    """Return whether a row is plain `text` to imitate; `prompt` and `messages` come first."""
    if row.get("prompt") or row.get("messages"):
        return False
    if not isinstance(row.get("text"), (str, type(None))):
        raise Refusal(f"{place}: column 'text': expected text, got {describe(row['text'])}")
    return bool(row.get("text"))


def has_target(row: dict, *, place: str) -> bool:
    """Return whether a row holds a response to imitate, plain `text` aside.

    Raises: Refusal for an `answer` that replaces a `completion` and is no text.
    """
    if row.get("prompt") and not row.get("completion"):
        answer = row.get("answer")
        if isinstance(answer, list):
            row["answer"] = _checked_messages(answer, place=f"{place}: column 'answer'")
        elif not isinstance(answer, (str, type(None))):
            raise Refusal(
                f"{place}: column 'answer': the response to imitate is text or messages, got "
                f"{describe(answer)}"
            )
    if row.get("prompt"):
        return bool(row.get("completion") or row.get("answer"))
    return any(m["role"] == "assistant" for m in row.get("messages") or [])


def pair_of(
    row: dict, *, place: str
) -> tuple[str | Messages, str | Messages, str | Messages, float]:
    """Return the prompt of a row, its chosen and rejected responses, and the margin.

    If `chosen` and `rejected` are whole conversations (their first turn is not the assistant's), or
    the row has no `prompt`, their common beginning is the prompt: turns, or text up to the first
    difference. A space before that belongs to the responses. This is TRL's implicit prompt.

    Args:
        place: origin of the row, for error messages.
    Raises: Refusal when a column is missing, a response is empty, or both are the same.
    """
    chosen = _text_or_messages(row, "chosen", place=place)
    rejected = _text_or_messages(row, "rejected", place=place)
    if type(chosen) is not type(rejected):
        raise Refusal(
            f"{place}: `chosen` and `rejected` must both be text or both be lists of messages, got "
            f"{describe(chosen)} and {describe(rejected)}"
        )
    if chosen == rejected:
        raise Refusal(f"{place}: `chosen` and `rejected` are equal, so neither is better")
    is_whole = isinstance(chosen, list) and chosen[0]["role"] != "assistant"
    if is_whole or not row.get("prompt"):
        prompt = chosen[: _common(chosen, rejected)]
        chosen = chosen[len(prompt) :]
        rejected = rejected[len(prompt) :]
        if not prompt:
            raise Refusal(
                f"{place}: there is no `prompt`, and `chosen` and `rejected` do not "
                "begin alike; a pair answers one prompt"
            )
    else:
        prompt = _text_or_messages(row, "prompt", place=place)
    for column, response in (("chosen", chosen), ("rejected", rejected)):
        if not response:
            raise Refusal(f"{place}: `{column}` is empty after the prompt that the two share")
    margin = row.get("margin")
    if margin is not None and not (
        type(margin) in (int, float) and -_MOST_MARGIN <= margin <= _MOST_MARGIN
    ):
        raise Refusal(
            f"{place}: `margin` must be a number of at most {_MOST_MARGIN}, got {describe(margin)}"
        )
    return prompt, chosen, rejected, float(margin or 0.0)


def label_of(row: dict, *, place: str) -> bool:
    """Return whether the `completion` of a row is a good one.

    Raises: Refusal when `prompt`, `completion` or `label` is missing or unusable.
    """
    for column in ("prompt", "completion"):
        _text_or_messages(row, column, place=place)
    label = row.get("label")
    if type(label) is not bool and not (type(label) is int and label in (0, 1)):
        raise Refusal(
            f"{place}: `label` must be true (a good response) or false, got "
            f"{describe(label)}; columns: {', '.join(map(str, row))}"
        )
    return bool(label)


def _text_or_messages(row: dict, column: str, *, place: str) -> str | Messages:
    value = row.get(column)
    if value is None:
        raise Refusal(
            f"{place}: the row has no column `{column}`; preference pairs have `prompt`, `chosen` "
            "and `rejected`, labelled responses `prompt`, `completion` and `label`; this one has "
            f"columns {_columns(row)}"
        )
    if not isinstance(value, (str, list)) or not value:
        raise Refusal(
            f"{place}: `{column}` must be text or messages and not empty, got {describe(value)}"
        )
    return value


def _common(a: str | Messages, b: str | Messages) -> int:
    """Return how many first characters or messages are the same, without a space at the end."""
    count = 0
    for x, y in zip(a, b):
        if x != y:
            break
        count += 1
    return count - 1 if count and a[count - 1] == " " else count


def ground_truth_of(row: dict) -> Any:
    """Return the reference answer: verl's reward_model.ground_truth, `ground_truth`, `answer`.

    Raises: Refusal naming the row's columns when it has none of them.
    """
    reward_model = row.get("reward_model")
    if isinstance(reward_model, dict) and reward_model.get("ground_truth") is not None:
        return reward_model["ground_truth"]
    for column in ("ground_truth", "answer"):
        if row.get(column) is not None:
            return row[column]
    raise Refusal(
        "the row has no reference answer (reward_model.ground_truth, ground_truth or "
        f"answer); its columns are {', '.join(map(str, row))}"
    )
