"""Recorded rollouts of a step in the compact form that the page reads."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

from spmdrl.report.page.folder import rounded
from spmdrl.report.recorded_groups import RecordedResponse, View

if TYPE_CHECKING:
    from spmdrl.data.attachments import Preview

MOST_CHARS = 200_000
"""Characters of a text on the page."""
MOST_TOKENS = 50_000
"""Tokens of a response on the page."""


def step_chunk(views: Sequence[View]) -> dict[str, Any]:
    """Return the groups of a step.

    Returns: {"step", "notes", "part_names", "vocabulary": {token: text}, "groups": [{"group",
        "row", "prompt", "samples"}]}; see `_sample` for a sample. The vocabulary is empty if no
        tokenizer can be loaded.
    """
    vocabulary: dict[int, str] = {}
    return {
        "step": views[0].step,
        "notes": views[0].notes,
        "part_names": [str(name) for name in views[0].header["part_names"]],
        "groups": [
            {
                "group": view.group,
                "row": view.sequences[0].row["row"],
                "prompt": [_part(part) for part in view.sequences[0].prompt],
                "samples": [_sample(one, vocabulary) for one in view.sequences],
            }
            for view in views
        ],
        "vocabulary": vocabulary,
    }


def _sample(one: RecordedResponse, vocabulary: dict[int, str]) -> dict[str, Any]:
    """Return a response. Its tokens begin at `start`, after what the page has already shown.

    Args:
        vocabulary: {token: text}, to which the response's tokens are added.
    Returns: among others `mask`, [[number of tokens, 1 if they were sampled]], `versions`,
        [[number of tokens, policy version]], and of the sampled tokens alone `logprobs`,
        `advantages`, [[number of tokens, advantage]], and `trainer`, the trainer's logprobs; the
        last two are empty if they were not recorded.
    """
    row = one.row
    end = min(len(row["tokens"]), one.start + MOST_TOKENS)
    places = range(one.start, end)
    tokens = row["tokens"][one.start : end]
    if one.pieces:
        vocabulary.update(zip(tokens, one.pieces[one.start : end]))
    mask = row["response_mask"]
    branch = one.branch
    num_sampled = sum(mask[at] for at in places)
    advantages = one.trained.advantages if one.trained else []
    logprobs = (one.trained.logprobs if one.trained else None) or []
    sample: dict[str, Any] = {
        "sample": row["sample"],
        "trace": row["trace"],
        "reward": rounded(row["reward"]) if row["is_valid"] else None,
        "raw": rounded(row["raw_reward"]),
        "parts": [rounded(value) for value in row["reward_parts"] or ()],
        "failure": clipped(row["failure"] or ""),
        "truncated": row["is_truncated"],
        "length": row["response_length"],
        "turns": row["turns"],
        "advantages": _runs([rounded(value) for value in advantages[:num_sampled]]),
        "trainer": [_logprob(value) for value in logprobs[:num_sampled]],
        "start": one.start,
        "tokens": tokens,
        "mask": _runs([int(mask[at]) for at in places]),
        "logprobs": [_logprob(row["rollout_logprobs"][at]) for at in places if mask[at]],
        "versions": _runs([row["policy_versions"][at] for at in places]),
        "images": {
            at - one.start: _part(item)
            for at, item in one.images.items()
            if one.start <= at < end and item is not None
        },
        "covered": [
            at - one.start for at, item in one.images.items() if at >= one.start and item is None
        ],
        "left_out": len(row["tokens"]) - end,
    }
    if branch is not None:
        sample |= {"parent": branch.parent, "depth": branch.depth}
    if not one.pieces:
        sample["text"] = clipped(row["response"])
    return sample


def clipped(text: str) -> str:
    """Return a text, or its beginning and how much is left out."""
    if len(text) <= MOST_CHARS:
        return text
    return f"{text[:MOST_CHARS]} [... {len(text) - MOST_CHARS} characters are left out]"


def _part(part: str | Preview) -> str | dict[str, str]:
    """Return text, or an image as its label and its PNG in base64."""
    if isinstance(part, str):
        return clipped(part)
    return {"label": part.label, "png": base64.b64encode(part).decode()}


def _runs(values: Sequence[Any]) -> list[list[Any]]:
    return [[len(list(own)), value] for value, own in groupby(values)]


def _logprob(value: float) -> float | None:
    number = rounded(value)
    return None if number is None else round(number, 4)
