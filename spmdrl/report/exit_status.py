"""The exit status of a run: 0, or 3 if it took no update in all its steps."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from spmdrl.config import Config
from spmdrl.journal import Journal
from spmdrl.world.launch import report_refusal, report_to_launcher
from spmdrl.world.world import World

log = logging.getLogger(__name__)

NOTHING_LEARNT = 3
"""Status of a run that did all its steps and took no update."""


Row = Mapping[str, Any]


def exit_status(cfg: Config, world: World, *, is_whole: bool = True) -> int:
    """Return the run's exit status on all ranks; on rank 0 log why, if nothing was learnt.

    Args:
        is_whole: all steps are done. A run that stopped earlier returns 0, since it can resume.
    """

    def look() -> tuple[str, bool]:
        rows = Journal(Path(cfg.output_dir) / "metrics.jsonl").rows()
        steps = [row for row in rows if "policy/skipped_updates" in row]
        return nothing_learnt(rows), any(map(_has_update, steps))

    text, has_update = world.from_rank_0(look, wait="see what was learnt")
    if text and world.rank == 0:
        log.error(text)
    if not text or has_update or not is_whole:
        return 0
    report_to_launcher(text)
    report_refusal(text)  # Slurm's next attempt would find the same
    return NOTHING_LEARNT


def nothing_learnt(rows: Sequence[Row]) -> str:
    """Return why nothing was learnt in any step; empty if something was, or no step is an update.

    Args:
        rows: the run's metrics of all attempts.
    """
    steps = [row for row in rows if "policy/skipped_updates" in row]  # none in a critic's warm-up
    if not steps or any(_has_update(row) and row.get("policy/grad_norm") != 0 for row in steps):
        return ""
    skipped = sum(row["policy/skipped_updates"] or 0 for row in steps)
    empty = sum(map(_is_empty, steps))
    flat = sum(map(_has_update, steps))
    why = []
    if skipped:
        why.append(
            f"{skipped:.0f} updates were skipped, since the loss or the gradient was not finite "
            "(the likeliest causes: a loss, an advantage or a reward that overflows or divides by "
            "0; the log names the files that hold these batches)"
        )
    if empty:
        left = sum(_left_out(row) for row in steps)
        failed = sum(row.get("rollout/failed_rewards") or 0 for row in steps)
        why.append(
            f"in {empty} steps no sample was in the loss: {left:.0f} were left out by an edit of "
            f"the loop (batch.without), and {failed:.0f} rewards failed"
        )
    if flat:
        why.append(
            f"in {flat} steps the gradient was 0 (equal rewards in each group, or all tokens "
            "clipped or masked)"
        )
    return f"nothing was learnt in {len(steps)} steps: {'; '.join(why)}"


def _has_update(row: Row) -> bool:
    """Return whether a step took an update on some sample."""
    is_skipped = (
        row.get("policy/grad_norm") is None and (row.get("policy/skipped_updates") or 0) > 0
    )
    return not (is_skipped or _is_empty(row))


def _is_empty(row: Row) -> bool:
    left = _left_out(row)
    return left > 0 and left + (row.get("rollout/failed_rewards") or 0) >= row["rollout/samples"]


def _left_out(row: Row) -> int:
    share = row.get("rollout/left_out_frac") or 0
    return round(share * row["rollout/samples"]) if share else 0
