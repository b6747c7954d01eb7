"""A page of the samples on which alternatives differ most, token by token."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

from spmdrl.report.recorded_groups import GroupReader, View
from spmdrl.rollout.recordings import RecordedSteps
from spmdrl.tools.rollouts.terminal import title
from spmdrl.tools.what_if.html import DOWN, UP, Paint, document, prompt_part, tokens_part
from spmdrl.tools.what_if.run import Outcome, StepOutcomes
from spmdrl.tools.what_if.text import COLUMNS, about, most_disputed, push_text, row

_CELL = 'style="padding: 0 .8em; text-align: right"'
_LEGEND = (
    "Green: the update raises the token's logprob; red: the update lowers it. The colour is "
    "strongest at the largest push of that alternative on this response. Grey: not sampled by the "
    "policy. Point at a token for its numbers."
)


def page(
    steps: Sequence[StepOutcomes],
    recorded: RecordedSteps,
    *,
    limit: int,
    tokenizer: str = "",
    trust_remote_code: bool = False,
    trust_run: bool = False,
) -> str:
    """Return a page of the tables of steps, and of the samples on which outcomes differ most.

    Each sample is shown twice: with the pushes of the alternative that raises it most, and of the
    one that lowers it most.

    Args:
        recorded: the run's recordings.
        limit: number of samples of a step.
        tokenizer: folder or hub name; empty: that of the run.
        trust_remote_code: run Python code of the tokenizer's folder.
        trust_run: run the advantage function that the run's config names.
    """
    body = ["<h1>what if</h1>", f"<p>{_LEGEND}</p>"]
    reader = GroupReader(
        recorded,
        tokenizer=tokenizer,
        needs_text=True,
        trust_remote_code=trust_remote_code,
        trust_run=trust_run,
    )
    for step in steps:
        body += _table(step)
        for one in most_disputed(step, limit=limit):
            (view,) = reader.read(step.step, one["group"])
            body += _sample(one, view, step)
    return document("what if", body)


def _table(step: StepOutcomes) -> list[str]:
    first, *others = map(escape, about(step).splitlines())
    heads = "".join(f"<th {_CELL}>{escape(name)}</th>" for name in ("", *COLUMNS))
    rows = [
        "".join(f"<td {_CELL}>{escape(t)}</td>" for t in (one.alternative.name, *row(one)))
        for one in step.outcomes
    ]
    body = "\n".join(f"<tr>{cells}</tr>" for cells in [heads, *rows])
    notes = [f"<p>{line}</p>" for line in others]
    return [f'<h2 id="step{step.step}">{first}</h2>', *notes, f"<table>{body}</table>"]


def _sample(one: dict[str, Any], view: View, step: StepOutcomes) -> list[str]:
    traces = [each for each in view.sequences if each.row["sample"] == one["sample"]]
    answer = traces[0]
    place = f"step{step.step}_group{one['group']}_sample{one['sample']}"
    heading = f"group {one['group']}, " + title(answer, view.header["part_names"])
    body = [
        f'<hr><h2 id="{escape(place)}">{escape(heading)}</h2>',
        *(f'<p class="note">{escape(note)}</p>' for note in view.notes),
        "<p>" + "<br>".join(escape(push_text(one, name)) for name in one["pushes"]) + "</p>",
        prompt_part(answer),
    ]
    outcomes = {outcome.alternative.name: outcome for outcome in step.outcomes}
    for name in (one["up"], one["down"]):
        body.append(f"<h2>{escape(push_text(one, name))}</h2>")
        for trace, row_of_batch in zip(traces, one["rows"], strict=True):
            body.append(tokens_part(trace, _paint(outcomes[name], row_of_batch)))
    return body


def _paint(outcome: Outcome, at: int) -> Paint:
    pushes = outcome.token_pushes.get(at, [])
    largest = max(map(abs, pushes), default=0.0)

    def paint(position: int) -> tuple[str, float, str]:
        push = pushes[position] if position < len(pushes) else 0.0
        strength = abs(push) / largest if largest else 0.0
        return (DOWN if push < 0 else UP), strength, f"push {push:+.3g}"

    return paint
