"""Recorded responses as HTML with coloured tokens, without other files."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape
from typing import TYPE_CHECKING

from spmdrl.report.recorded_groups import RecordedResponse

if TYPE_CHECKING:
    from spmdrl.data.attachments import Preview

UP = "0, 150, 60"
DOWN = "210, 40, 40"
"""Green and red."""
Paint = Callable[[int], tuple[str, float, str]]
"""Takes a token's position. Returns its colour, its strength from 0 to 1, and a note."""
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2em auto; max-width: 60em; color: #222; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; margin: .3em 0 1.2em; padding: .7em;
      border: 1px solid #ddd; border-radius: 4px; font: 14px/1.6 ui-monospace, monospace; }
h2 { font-size: 1em; margin: 0; }
.other { color: #777; font-style: italic; }
.note { color: #a40; }
"""


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
