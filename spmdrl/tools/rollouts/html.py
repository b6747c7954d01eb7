"""Groups of recorded rollouts as one HTML page without other files."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape
from typing import TYPE_CHECKING

from spmdrl.errors import Refusal
from spmdrl.tools.rollouts.terminal import title
from spmdrl.tools.rollouts.view import RecordedResponse, View

if TYPE_CHECKING:
    from spmdrl.data.attachments import Preview

_STRONGEST_NATS = -5.0
"""A token with this logprob, or a lower one, has the strongest colour."""
UP = "0, 150, 60"
DOWN = "210, 40, 40"
UNLIKELY = "220, 120, 0"
"""Green, red and orange."""
Paint = Callable[[int], tuple[str, float, str]]
"""Takes a token's position. Returns its colour, its strength from 0 to 1, and a note."""
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2em auto; max-width: 60em; color: #222; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; margin: .3em 0 1.2em; padding: .7em;
      border: 1px solid #ddd; border-radius: 4px; font: 14px/1.6 ui-monospace, monospace; }
h2 { font-size: 1em; margin: 0; }
summary { font-weight: bold; overflow-wrap: anywhere; cursor: pointer; }
.other { color: #777; font-style: italic; }
.note { color: #a40; }
"""


def page(views: Sequence[View], *, color: str = "") -> str:
    """Return groups of a step as a page of coloured tokens; the pointer shows a token's numbers.

    If there are several groups, each can be opened below its number, rewards and prompt.

    Args:
        color: `advantage` (green above 0, red below, relative to the group's largest) or `logprob`
            (stronger for less likely tokens); empty: by advantage if it is known.
    Raises: Refusal for colours by an advantage that is not known.
    """
    step = f"step {views[0].step}"
    heading = f"{step}, group {views[0].group}" if len(views) == 1 else step
    body = [f"<h1>{escape(heading)}</h1>"]
    for view in views:
        lines = _group(view, color=color)
        if len(views) > 1:
            place = f"group{view.group}"
            summary = f"<summary>{escape(_summary(view))}</summary>"
            lines = [f'<details id="{escape(place)}">', summary, *lines, "</details>"]
        body += lines
    return document(heading, body)


def document(heading: str, body: Sequence[str]) -> str:
    """Return a page.

    Args:
        heading: text.
        body: parts in HTML.
    """
    heading = escape(heading)
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f"<title>{heading}</title><style>{_STYLE}</style></head>\n<body>\n"
        + "\n".join(body)
        + "\n</body></html>\n"
    )


def _summary(view: View) -> str:
    """Return one line: the group's number, its samples' rewards, the beginning of its prompt."""
    firsts = [one.row for one in view.sequences if one.row["trace"] == 0]
    rewards = [f"{row['reward']:g}" for row in firsts if row["is_valid"]]
    prompt = " ".join(view.sequences[0].row["prompt"].split())
    return f"group {view.group}: rewards {' '.join(rewards) or 'none'}: {prompt:.100}"


def _group(view: View, *, color: str) -> list[str]:
    sizes = [abs(one.advantage) for one in view.sequences if one.advantage is not None]
    if color == "advantage" and not sizes:
        raise Refusal(f"--color advantage: {'; '.join(view.notes)}; take --color logprob")
    color = color or ("advantage" if sizes else "logprob")
    largest = max(sizes, default=0.0)
    legend = f"stronger for less likely tokens; strongest at {_STRONGEST_NATS:g} nats"
    if color == "advantage":
        legend = f"green: advantage above 0, red: below; strongest at {largest:.4g}"
    first = view.sequences[0].row
    body = [
        f"<p>data row {first['row'] + 1}; {escape(legend)}; grey: not "
        "sampled by the policy. Point at a token for its numbers.</p>",
        *(f'<p class="note">{escape(note)}</p>' for note in view.notes),
        "<h2>prompt</h2>",
        prompt_part(view.sequences[0]),
    ]
    for one in view.sequences:
        body += _response(one, view, color=color, largest=largest)
    return body


def _response(one: RecordedResponse, view: View, *, color: str, largest: float) -> list[str]:
    def paint(at: int) -> tuple[str, float, str]:
        if color == "logprob":
            return UNLIKELY, one.row["rollout_logprobs"][at] / _STRONGEST_NATS, advantage_text
        advantage = one.advantage or 0.0
        strength = abs(advantage) / largest if largest else 0.0
        return (DOWN if advantage < 0 else UP), strength, advantage_text

    advantage_text = "" if one.advantage is None else f"advantage {one.advantage:.4g}"
    lines = [f"<h2>{escape(title(one, view.header['part_names']))}</h2>", tokens_part(one, paint)]
    if one.branch is None:
        return lines
    return [f'<div style="margin-left: {2 * one.branch.depth}em">', *lines, "</div>"]


def prompt_part(one: RecordedResponse) -> str:
    """Return the prompt of a response, with its images."""
    return f"<pre>{''.join(map(_part, one.prompt))}</pre>"


def tokens_part(one: RecordedResponse, paint: Paint) -> str:
    """Return a response, with colours for the tokens that the policy sampled."""
    spans = [_token(one, at, paint) for at in range(one.start, len(one.row["tokens"]))]
    return f"<pre>{''.join(spans)}</pre>"


def _part(part: str | Preview) -> str:
    """Return text, or an image."""
    return escape(part) if isinstance(part, str) else part.html


def _token(one: RecordedResponse, at: int, paint: Paint) -> str:
    row = one.row
    if at in one.images:
        png = one.images[at]
        return "" if png is None else _part(png)
    text = escape(one.pieces[at] if one.pieces else f"{row['tokens'][at]} ")
    if not row["response_mask"][at]:
        return f'<span class="other">{text}</span>'
    hue, strength, note = paint(at)
    logprob = row["rollout_logprobs"][at]
    numbers = f"id {row['tokens'][at]}, logprob {logprob:.4f}, version {row['policy_versions'][at]}"
    numbers += f", {note}" if note else ""
    strength = min(1.0, max(0.0, strength))
    return (
        f'<span style="background: rgba({hue}, {0.6 * strength:.3f})" '
        f'title="{escape(numbers)}">{text}</span>'
    )
