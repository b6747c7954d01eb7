"""Show which rank waited for which, and for how long; write a trace for Perfetto.

    python -m spmdrl timeline runs/mine
    python -m spmdrl timeline runs/mine --steps 10 20
    python -m spmdrl timeline runs/mine --steps 12 --out trace.json

Every run records a timeline, see docs/timeline.md.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import count
from pathlib import Path
from typing import Annotated, Any

import tyro

from spmdrl.errors import Refusal
from spmdrl.imports import refusing
from spmdrl.report.timeline import FOLDER, RankStep, read_timeline
from spmdrl.report.waits import critical_path, waits_of
from spmdrl.run_folder import write_file
from spmdrl.tools.commands import run_command
from spmdrl.world.lost_peers.place import names_of

_SHOWN_PHASES = 6
_LEAST_ARROW_S = 1e-3  # shorter waits get no arrow in a trace


def timeline(
    run: Annotated[Path, tyro.conf.Positional],
    *,
    steps: tuple[int, ...] = (),
    out: Path | None = None,
    limit: int = 20,
) -> str:
    """Show which rank waited for which, and for how long; write a trace for Perfetto.

    Args:
        run: output_dir of a run.
        steps: first and last step; one number for one step. All steps if it is left out.
        out: write a Chrome trace there, for ui.perfetto.dev or chrome://tracing; compressed if it
            ends in .gz.
        limit: lines of waits to print.
    Returns: the text to print.
    Raises: Refusal for a run without a timeline of these steps, and a trace that cannot be
        written.
    """
    if len(steps) > 2:
        raise Refusal(f"--steps takes a first and a last step, not {len(steps)} numbers")
    first, last = (steps[0], steps[-1]) if steps else (0, None)
    with refusing(f"{run / FOLDER} cannot be read", OSError):
        found = read_timeline(run, first=first, last=last)
    if not found:
        what = f"no step from {first} to {last}" if steps else "no step"
        raise Refusal(f"{run / FOLDER} has {what}; name the output_dir of a run that has done it")
    if out is None:
        return _text(found, limit=limit)
    data = json.dumps({"traceEvents": [*trace_events(found)], "displayTimeUnit": "ms"}).encode()
    with refusing(f"--out {out}: no trace can be written there", OSError):
        write_file(out, gzip.compress(data) if out.suffix == ".gz" else data)
    return f"wrote {out}; open it in https://ui.perfetto.dev or chrome://tracing"


# --------------------------------------------------------------------------- text


def _text(steps: Sequence[Sequence[RankStep]], *, limit: int) -> str:
    first = steps[0][0].step
    last = steps[-1][0].step
    name = f"step {first}" if first == last else f"steps {first} to {last}"
    num_ranks = len({one.rank for ranks in steps for one in ranks})
    paths = [part for ranks in steps for part in critical_path(ranks)]
    total = sum(part.seconds for part in paths)
    lines = [
        f"{name}: {total / len(steps):.3f} s a step on {num_ranks} ranks",
        "",
        "the phases that made it so long (nothing else would shorten it):",
    ]
    phases: dict[str, float] = {}
    for part in paths:
        phases[part.name] = phases.get(part.name, 0.0) + part.seconds
    for phase in sorted(phases, key=lambda name: -phases[name])[:_SHOWN_PHASES]:
        seconds = phases[phase]
        where = names_of(sorted({part.rank for part in paths if part.name == phase}))
        where = where.removeprefix("each of the ")
        lines.append(f"  {seconds / total:6.1%} {seconds:9.3f} s  {phase}, on {where}")
    lines += ["", "who waited for whom, the longest first:"]
    waited: dict[tuple[str, int, str], dict[int, float]] = {}
    for wait in (wait for ranks in steps for wait in waits_of(ranks)):
        of_ranks = waited.setdefault((wait.name, wait.for_rank, wait.doing), {})
        of_ranks[wait.rank] = of_ranks.get(wait.rank, 0.0) + wait.seconds
    ordered = sorted(waited.items(), key=lambda item: -max(item[1].values()))
    for (phase, for_rank, doing), of_ranks in ordered[:limit]:
        who = names_of(sorted(of_ranks))
        lines.append(
            f"  {max(of_ranks.values()):9.3f} s  {who} in {phase} for rank {for_rank}, which was "
            f"in {doing}"
        )
    if len(ordered) > limit:
        lines.append(f"  ... and {len(ordered) - limit} shorter ones (--limit)")
    if not ordered:
        lines.append("  no rank waited")
    if left_out := sum(one.left_out for ranks in steps for one in ranks):
        lines.append(f"{left_out} spans were not recorded, since a step had too many of a name")
    return "\n".join(lines)


# --------------------------------------------------------------------------- trace


def trace_events(steps: Sequence[Sequence[RankStep]]) -> Iterator[dict[str, Any]]:
    """Yield the events of a Chrome trace: a process for each machine, a thread for each rank.

    An arrow leads from where the last rank entered a phase to each rank that had waited for it.
    """
    start = min(one.began_unix_s for ranks in steps for one in ranks)
    hosts = {one.rank: one.host for ranks in steps for one in ranks}
    processes = {host: i for i, host in enumerate(dict.fromkeys(hosts.values()))}
    for host, process in processes.items():
        yield {"ph": "M", "name": "process_name", "pid": process, "args": {"name": host}}
    for rank, host in hosts.items():
        place = {"pid": processes[host], "tid": rank}
        yield {"ph": "M", "name": "thread_name", **place, "args": {"name": f"rank {rank}"}}
        yield {"ph": "M", "name": "thread_sort_index", **place, "args": {"sort_index": rank}}

    def at(rank: int, unix_s: float, after_s: float = 0.0) -> dict[str, Any]:
        # Two products: where seconds since 1970 are added up, neighbouring spans would overlap.
        ts = (unix_s - start) * 1e6 + after_s * 1e6
        return {"pid": processes[hosts[rank]], "tid": rank, "ts": round(ts, 3)}

    arrows = count(1)
    for ranks in steps:
        waits = waits_of(ranks)
        waited = {(wait.rank, wait.name, wait.began_unix_s): wait for wait in waits}
        for one in ranks:
            begin = at(one.rank, one.began_unix_s)
            yield _slice(f"step {one.step}", begin, one.seconds, {"attempt": one.attempt})
        for one, span in [(each, span) for each in ranks for span in each.spans]:
            args: dict[str, Any] = {"step": one.step}
            if span.waits:
                args["who waits here"] = span.waits
            if wait := waited.get((one.rank, span.name, one.began_unix_s + span.start_s)):
                args["waited_s"] = round(wait.seconds, 6)
                args["waited for"] = f"rank {wait.for_rank}, in {wait.doing}"
            place = at(one.rank, one.began_unix_s, span.start_s)
            yield _slice(span.name, place, span.seconds, args)
        for wait in waits:
            if wait.seconds < _LEAST_ARROW_S:
                continue
            arrow = {"cat": "wait", "name": f"waited in {wait.name}", "id": next(arrows)}
            yield {"ph": "s", **arrow, **at(wait.for_rank, wait.ended_unix_s)}
            yield {"ph": "f", "bp": "e", **arrow, **at(wait.rank, wait.ended_unix_s)}


def _slice(name: str, place: dict[str, Any], seconds: float, args: dict[str, Any]) -> dict:
    dur = round(seconds * 1e6, 3)
    return {"ph": "X", "name": name, "cat": "phase", **place, "dur": dur, "args": args}


main = partial(run_command, "timeline", timeline)
