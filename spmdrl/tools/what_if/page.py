"""A page of the samples on which alternatives differ most, token by token."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jinja2

from spmdrl.report.recorded_groups import GroupReader, RecordedResponse, View
from spmdrl.rollout.recordings import RecordedSteps
from spmdrl.tools.rollouts.terminal import title
from spmdrl.tools.what_if.run import Outcome, StepOutcomes
from spmdrl.tools.what_if.text import COLUMNS, about, most_disputed, push_text, row

if TYPE_CHECKING:
    from spmdrl.data.attachments import Preview

_TEMPLATE = Path(__file__).with_name("page.html")
_UP = "0, 150, 60"
_DOWN = "210, 40, 40"


def page(
    steps: Sequence[StepOutcomes],
    recorded: RecordedSteps,
    *,
    limit: int,
    tokenizer: str = "",
    trust_remote_code: bool = False,
) -> str:
    """Return a page of the tables of steps, and of the samples on which outcomes differ most.

    Each sample is shown twice: with the pushes of the alternative that raises it most, and of the
    one that lowers it most.

    Args:
        recorded: the run's recordings.
        limit: number of samples of a step.
        tokenizer: folder or hub name; empty: that of the run.
        trust_remote_code: run Python code of the tokenizer's folder.
    """
    reader = GroupReader(
        recorded, tokenizer=tokenizer, needs_text=True, trust_remote_code=trust_remote_code
    )
    shown = []
    for step in steps:
        samples = []
        for one in most_disputed(step, limit=limit):
            (view,) = reader.read(step.step, one["group"])
            samples.append(_sample(one, view, step))
        shown.append(
            {
                "number": step.step,
                "about": about(step).splitlines(),
                "heads": ["", *COLUMNS],
                "rows": [[one.alternative.name, *row(one)] for one in step.outcomes],
                "samples": samples,
            }
        )
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    template = environment.from_string(_TEMPLATE.read_text(encoding="utf-8"))
    return template.render(steps=shown)


def _sample(one: dict[str, Any], view: View, step: StepOutcomes) -> dict[str, Any]:
    traces = [each for each in view.sequences if each.row["sample"] == one["sample"]]
    answer = traces[0]
    outcomes = {outcome.alternative.name: outcome for outcome in step.outcomes}
    shown = []
    for name in (one["up"], one["down"]):
        pairs = zip(traces, one["rows"], strict=True)
        responses = [_response(trace, outcomes[name], at) for trace, at in pairs]
        shown.append({"heading": push_text(one, name), "responses": responses})
    return {
        "place": f"step{step.step}_group{one['group']}_sample{one['sample']}",
        "heading": f"group {one['group']}, " + title(answer, view.header["part_names"]),
        "notes": view.notes,
        "pushes": [push_text(one, name) for name in one["pushes"]],
        "prompt": [_plain(part) for part in answer.prompt],
        "shown": shown,
    }


def _plain(part: str | Preview) -> dict[str, Any]:
    """Return text, or an image, as the template takes it."""
    if isinstance(part, str):
        return _part(part)
    png = base64.b64encode(part).decode()
    return _part(part.label if png else f"[{part.label}]", png=png)


def _part(text: str, **own: Any) -> dict[str, Any]:
    return {"text": text, "png": "", "color": "", "numbers": "", "is_read": False} | own


def _response(one: RecordedResponse, outcome: Outcome, at: int) -> list[dict[str, Any]]:
    """Return a response's tokens, with colours for those that the policy sampled.

    Args:
        at: its row in the batch.
    """
    pushes = outcome.token_pushes.get(at, [])
    largest = max(map(abs, pushes), default=0.0)
    numbers = one.row
    parts = []
    for place in range(one.start, len(numbers["tokens"])):
        if place in one.images:
            image = one.images[place]
            parts += [] if image is None else [_plain(image)]
            continue
        token = numbers["tokens"][place]
        text = one.pieces[place] if one.pieces else f"{token} "
        if not numbers["response_mask"][place]:
            parts.append(_part(text, is_read=True))
            continue
        push = pushes[place] if place < len(pushes) else 0.0
        strength = abs(push) / largest if largest else 0.0
        hue = _DOWN if push < 0 else _UP
        said = f"id {token}, logprob {numbers['rollout_logprobs'][place]:.4f}, "
        said += f"version {numbers['policy_versions'][place]}, push {push:+.3g}"
        parts.append(_part(text, color=f"rgba({hue}, {0.6 * strength:.3f})", numbers=said))
    return parts
