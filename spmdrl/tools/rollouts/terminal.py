"""Recorded rollouts as text: a folder's steps, a step's groups, one group token by token."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from itertools import groupby
from typing import TYPE_CHECKING

from spmdrl.report.recorded_groups import RecordedResponse, Summary, View, summaries

if TYPE_CHECKING:
    from spmdrl.data.attachments import Preview
    from spmdrl.rollout.recordings import RecordedSteps

SORTS: dict[str, Callable[[Summary], float]] = {
    "reward": lambda group: -group.mean,
    "length": lambda group: -group.length,
    "spread": lambda group: -group.spread,
}
"""Orders of a step's groups, largest first."""
_PROMPT_CHARS = 40


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return a table's rows as lines with aligned columns; the last column is not padded."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    lines = []
    for *cells, last in rows:
        padded = [cell.rjust(width) for cell, width in zip(cells, widths)]
        lines.append("  ".join([*padded, last]))
    return lines


def steps_text(recorded: RecordedSteps) -> str:
    """Return the steps of a folder, one line each."""
    rows = [["step", "files", "MB", "reward"]]
    for step, files in recorded.steps.items():
        means = [one.mean for one in summaries(recorded, step)]
        means = [mean for mean in means if not math.isnan(mean)]
        mean = statistics.fmean(means) if means else math.nan
        size = sum(path.stat().st_size for path in files) / 1e6
        rows.append([str(step), str(len(files)), f"{size:.3f}", f"{mean:.3f}"])
    hint = "--step N lists the groups of a step"
    return "\n".join([str(recorded.folder), *aligned(rows), hint])


def groups_text(found: Sequence[Summary], *, sort: str, limit: int) -> str:
    """Return a step's groups, one line each, sorted by `sort` (largest first) or number."""
    order = sorted(found, key=SORTS[sort]) if sort else list(found)
    rows = [["group", "row", "samples", "reward", "spread", "length", "cut", "prompt"]]
    for one in order[:limit]:
        rows.append(
            [
                str(one.group),
                str(one.row + 1),
                str(one.samples),
                f"{one.mean:.3f}",
                f"{one.spread:.3f}",
                f"{one.length:.1f}",
                str(one.truncated),
                " ".join(one.prompt.split())[:_PROMPT_CHARS],
            ]
        )
    lines = aligned(rows)
    if len(order) > limit:
        lines.append(f"... {len(order) - limit} more: --limit {len(order)}")
    return "\n".join([*lines, "--group N shows one"])


def group_text(view: View, *, tokens: bool) -> str:
    """Return a group with its responses.

    An episode of several traces is a tree: each trace is indented below the one that it leaves, and
    shows what was read and what was sampled from there on.

    Args:
        tokens: also list each token of the responses.
    """
    first = view.sequences[0].row
    lines = [
        f"step {view.step}, group {view.group}, data row {first['row'] + 1}",
        *(f"note: {note}" for note in view.notes),
        "prompt:",
        _indented("".join(map(_part, view.sequences[0].prompt))),
    ]
    for sequence in view.sequences:
        branch = sequence.branch
        text = sequence.row["response"] if branch is None else "\n".join(_segments(sequence))
        own = [title(sequence, view.header["part_names"]), _indented(text)]
        if tokens:
            own.append(_indented("\n".join(_token_lines(sequence))))
        lines.append(_indented("\n".join(own), depth=0 if branch is None else branch.depth))
    return "\n".join(lines)


def _segments(sequence: RecordedResponse) -> list[str]:
    """Return lines of what was read and sampled in a trace, from where it leaves earlier ones."""
    row = sequence.row
    positions = range(sequence.start, len(row["tokens"]))
    lines = []
    for is_sampled, own in groupby(positions, key=row["response_mask"].__getitem__):
        pieces = sequence.pieces
        texts = [pieces[at] if pieces else f"{row['tokens'][at]} " for at in own]
        lines.append(f"{'sampled' if is_sampled else 'read'}: {''.join(texts)}")
    return lines


def title(sequence: RecordedResponse, names: Sequence[str]) -> str:
    """Return the line of numbers above a response."""
    row = sequence.row
    name = "greedy" if row["sample"] < 0 else f"sample {row['sample']}"
    words = [f"{name} trace {row['trace']}" if row["trace"] else name]
    branch = sequence.branch
    if branch is not None and branch.parent is not None:
        words.append(f"after token {branch.start} of trace {branch.parent}")
    words.append(
        f"reward {row['reward']:.4g}" if row["is_valid"] else f"reward failed ({row['failure']})"
    )
    raw = row["raw_reward"]
    if raw is not None and raw != row["reward"]:
        words.append(f"before shaping {raw:.4g}")
    if len(names) > 1 and row["sample"] >= 0:
        words += [f"{name} {value:.4g}" for name, value in zip(names, row["reward_parts"])]
    trained = sequence.trained
    if trained and trained.advantages:
        ends = sorted({min(trained.advantages), max(trained.advantages)})
        words.append("advantage " + " to ".join(f"{value:.4g}" for value in ends))
    words.append(f"{row['response_length']} tokens" + (", cut" if row["is_truncated"] else ""))
    if row["turns"] > 1:
        words.append(f"{row['turns']} turns")
    return ", ".join(words)


def _token_lines(sequence: RecordedResponse) -> list[str]:
    row = sequence.row
    rows = [["at", "id", "logprob", "ratio", "advantage", "version", "token"]]
    trained = sequence.trained
    place = 0  # among the sampled tokens, none of which is before the start
    for at in range(sequence.start, len(row["tokens"])):
        piece = repr(sequence.pieces[at]) if sequence.pieces else ""
        item = sequence.images.get(at)
        piece += "" if item is None else _part(item)
        if row["response_mask"][at]:
            logprob = f"{row['rollout_logprobs'][at]:.4f}"
            version = str(row["policy_versions"][at])
            ratio = advantage = "-"
            if trained:
                advantage = f"{trained.advantages[place]:.4g}"
            if trained and trained.logprobs:
                gap = trained.logprobs[place] - row["rollout_logprobs"][at]
                ratio = f"{math.exp(gap):.4g}"
            place += 1
        else:
            logprob = ratio = advantage = version = "-"
            piece += " (not sampled)"
        id_ = str(row["tokens"][at])
        rows.append([str(at), id_, logprob, ratio, advantage, version, piece])
    return aligned(rows)


def _part(part: str | Preview) -> str:
    """Return text, or a mark for an image."""
    return part if isinstance(part, str) else f"[{part.label}]"


def _indented(text: str, *, depth: int = 1) -> str:
    return "\n".join(4 * depth * " " + line for line in text.splitlines() or [""])
