"""The timeline of a step in the compact form that the page reads."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from spmdrl.report.timeline import FOLDER, RankStep, rank_files, read_timeline
from spmdrl.report.waits import critical_path, waits_of

_MOST_WAITS = 200
_MOST_SPANS = 20_000


def newest_steps(folder: Path, *, most_bytes: int) -> tuple[dict[int, list[RankStep]], bool]:
    """Return {step: what its ranks did} of a run, and whether these are all steps.

    Args:
        most_bytes: of the timeline's files. Of larger ones the ends are read, and steps that not
            all ranks' ends have are left out.
    """
    files = rank_files(folder / FOLDER)
    if sum(path.stat().st_size for path in files.values()) <= most_bytes:
        return {ranks[0].step: ranks for ranks in read_timeline(folder)}, True
    steps = read_timeline(folder, newest_bytes=max(1, most_bytes // len(files)))
    return {ranks[0].step: ranks for ranks in steps if len(ranks) == len(files)}, False


def timeline_chunk(ranks: Sequence[RankStep]) -> dict[str, Any]:
    """Return what the ranks did in a step. Times are in seconds since its first rank began.

    Returns:
        `ranks`: [[rank, host, replica, begin, spans left out, [[name, begin, seconds, waits]]]];
        `waits`: [[name, rank, rank that it waited for, begin, seconds, what that rank did]], the
            longest first;
        `path`: the critical path, [[rank, name, begin, seconds]].
    """
    began = min(one.began_unix_s for one in ranks)
    most = max(1, _MOST_SPANS // len(ranks))

    def since(unix_s: float) -> float:
        return round(unix_s - began, 6)

    rows = []
    for one in ranks:
        offset = since(one.began_unix_s)
        spans = [
            [span.name, round(offset + span.start_s, 6), round(span.seconds, 6), span.waits]
            for span in one.spans[:most]
        ]
        left_out = one.left_out + max(0, len(one.spans) - most)
        rows.append([one.rank, one.host, one.replica, offset, left_out, spans])
    waits = [
        [
            one.name,
            one.rank,
            one.for_rank,
            since(one.began_unix_s),
            round(one.seconds, 6),
            one.doing,
        ]
        for one in waits_of(ranks)[:_MOST_WAITS]
    ]
    path = [
        [part.rank, part.name, since(part.began_unix_s), round(part.seconds, 6)]
        for part in critical_path(ranks)
    ]
    return {"ranks": rows, "waits": waits, "path": path}
