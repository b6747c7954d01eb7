"""Recorded rollouts as text: a folder's steps, a step's groups, one group token by token."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from spmdrl.tools.rollouts.view import Answer, Summary, View, summaries

if TYPE_CHECKING:
    from spmdrl.data.attachments import Preview
    from spmdrl.rollout.recordings import Recorded

SORTS: dict[str, Callable[[Summary], float]] = {
    "reward": lambda group: -group.mean,
    "length": lambda group: -group.length,
    "spread": lambda group: -group.spread,
}
"""Orders of a step's groups, largest first."""


def steps_text(recorded: Recorded) -> str:
    """Return the steps of a folder, one line each."""
    lines = [f"{recorded.folder}", f"{'step':>8}  {'files':>5}  {'MB':>8}  {'reward':>8}"]
    for step, files in recorded.steps.items():
        groups = summaries(recorded, step)
        means = [one.mean for one in groups if not math.isnan(one.mean)]
        mean = statistics.fmean(means) if means else math.nan
        size = sum(path.stat().st_size for path in files) / 1e6
        lines.append(f"{step:>8}  {len(files):>5}  {size:>8.3f}  {mean:>8.3f}")
    return "\n".join([*lines, "--step N lists the groups of a step"])


def groups_text(found: Sequence[Summary], *, sort: str, limit: int) -> str:
    """Return a step's groups, one line each, sorted by `sort` (largest first) or number."""
    order = sorted(found, key=SORTS[sort]) if sort else list(found)
    lines = [
        f"{'group':>6} {'row':>8} {'samples':>8} {'reward':>8} {'spread':>8} {'length':>8} "
        f"{'cut':>4}  prompt"
    ]
    for one in order[:limit]:
        prompt = " ".join(one.prompt.split())
        lines.append(
            f"{one.group:>6} {one.row + 1:>8} {one.samples:>8} {one.mean:>8.3f} "
            f"{one.spread:>8.3f} {one.length:>8.1f} {one.truncated:>4}  {prompt[:40]}"
        )
    if len(order) > limit:
        lines.append(f"... {len(order) - limit} more: --limit {len(order)}")
    return "\n".join([*lines, "--group N shows one"])


def group_text(view: View, *, tokens: bool) -> str:
    """Return a group with its responses, and token by token if `tokens`."""
    first = view.sequences[0].row
    lines = [
        f"step {view.step}, group {view.group}, data row {first['row'] + 1}",
        *(f"note: {note}" for note in view.notes),
        "prompt:",
        _indented("".join(map(_part, view.sequences[0].prompt))),
    ]
    for sequence in view.sequences:
        lines += [title(sequence, view.header["part_names"]), _indented(sequence.row["response"])]
        if tokens:
            lines += _token_lines(sequence)
    return "\n".join(lines)


def title(sequence: Answer, names: Sequence[str]) -> str:
    """Return the line of numbers above a response."""
    row = sequence.row
    words = ["greedy" if row["sample"] < 0 else f"sample {row['sample']}"]
    words.append(
        f"reward {row['reward']:.4g}" if row["is_valid"] else f"reward failed ({row['failure']})"
    )
    raw = row["raw_reward"]
    if raw is not None and raw != row["reward"]:
        words.append(f"before shaping {raw:.4g}")
    if len(names) > 1 and row["sample"] >= 0:
        words += [f"{name} {value:.4g}" for name, value in zip(names, row["reward_parts"])]
    if sequence.advantage is not None:
        words.append(f"advantage {sequence.advantage:.4g}")
    words.append(f"{row['response_length']} tokens" + (", cut" if row["is_truncated"] else ""))
    if row["turns"] > 1:
        words.append(f"{row['turns']} turns")
    return ", ".join(words)


def _token_lines(sequence: Answer) -> list[str]:
    row = sequence.row
    lines = [f"    {'at':>5} {'id':>7} {'logprob':>9} {'version':>7}  token"]
    for at in range(sequence.start, len(row["tokens"])):
        piece = repr(sequence.pieces[at]) if sequence.pieces else ""
        item = sequence.shows.get(at)
        piece += "" if item is None else _part(item)
        token = f"    {at:>5} {row['tokens'][at]:>7}"
        lines.append(
            f"{token} {row['rollout_logprobs'][at]:>9.4f} {row['policy_versions'][at]:>7}  {piece}"
            if row["response_mask"][at]
            else f"{token} {'-':>9} {'-':>7}  {piece} (not sampled)"
        )
    return lines


def _part(part: str | Preview) -> str:
    """Return text, or a mark for an image."""
    return part if isinstance(part, str) else f"[{part.label}]"


def _indented(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.splitlines() or [""])
