"""A run that three trackers see, in a process of its own: their libraries are not installed.

    python -m tests.helpers.tracker_run FOLDER

It does steps 0 to 5 and stops, and resumes at step 4 with 9 steps. Then it prints as JSON what the
libraries read back.
"""

from __future__ import annotations

import dataclasses
import json
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from spmdrl.config import TrackioSettings, WandbSettings
from tests.helpers.report_world import config, record_steps, reporting


def main(folder: Path) -> None:
    """Record the two attempts, and print what was recorded."""
    cfg = config(
        folder,
        steps=8,
        trackers=("wandb", "tensorboard", "trackio"),
        wandb=WandbSettings(mode="offline", project="sums", group="tests", tags=("one", "two")),
        trackio=TrackioSettings(project="sums", group="tests"),
    )
    with reporting(cfg, ending="stopped") as report:
        record_steps(report, 0, 4)
        report.evaluation(4, {"eval/reward": (2, 4)})
        record_steps(report, 4, 6)
    with reporting(dataclasses.replace(cfg, steps=9), step=4) as report:
        record_steps(report, 4, 9, reward=0.75)
        report.evaluation(9, {"eval/reward": (3, 4)})
    found = {
        "wandb": [_wandb(path) for path in sorted(folder.glob("wandb/offline-run-*/*.wandb"))],
        "tensorboard": _tensorboard(folder / "tensorboard"),
        "trackio": _trackio(),
    }
    print(f"\n{json.dumps(found)}")


def _wandb(path: Path) -> dict[str, Any]:
    from wandb.proto import wandb_internal_pb2

    found: dict[str, Any] = {"points": [], "tables": [], "files": []}
    for data in _records(path.read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        kind = record.WhichOneof("record_type")
        if kind == "run":
            run = record.run
            found |= {
                "id": run.run_id,
                "name": run.display_name,
                "project": run.project,
                "group": run.run_group,
                "tags": [*run.tags],
                "config": {item.key: json.loads(item.value_json) for item in run.config.update},
            }
        elif kind == "history":
            names = [item.key or "/".join(item.nested_key) for item in record.history.item]
            values = [json.loads(item.value_json) for item in record.history.item]
            row = dict(zip(names, values))
            if "reward/mean" in row:
                found["points"].append([row["step"], row["reward/mean"]])
            if "samples/path" in row:
                table = path.parent / "files" / row["samples/path"]
                found["tables"].append(json.loads(table.read_text()))
        elif kind == "files":
            found["files"] += [file.path for file in record.files.files]
        elif kind == "metric":
            found["over"] = record.metric.step_metric
        elif kind == "exit":
            found["exit"] = record.exit.exit_code
    return found


def _records(content: bytes) -> Iterator[bytes]:
    """Yield the records of a W&B file: LevelDB's log format after a header of 7 bytes."""
    at = 7
    parts = b""
    while at + 7 <= len(content):
        left_in_block = 32768 - at % 32768
        if left_in_block < 7:
            at += left_in_block
            continue
        _, size, kind = struct.unpack("<IHB", content[at : at + 7])
        parts += content[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # a whole one, or the last part of one
            yield parts
            parts = b""


def _tensorboard(folder: Path) -> dict[str, Any]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    found: dict[str, Any] = {
        name: [[event.step, event.value] for event in events.Scalars(name)]
        for name in ("reward/mean", "eval/reward")
    }
    for tag in events.Tags()["tensors"]:
        newest = events.Tensors(tag)[-1]
        found[tag] = newest.tensor_proto.string_val[0].decode()
    found["images"] = events.Tags()["images"]
    return found


def _trackio() -> dict[str, Any]:
    import trackio
    from trackio.sqlite_storage import SQLiteStorage

    (run,) = trackio.Api().runs("sums")
    rows = SQLiteStorage.get_logs("sums", run.name)
    return {
        "name": run.name,
        "id": run.id,
        "config": run.config,
        "points": [[row["step"], row["reward/mean"]] for row in rows if "reward/mean" in row],
        "tables": [row["samples"]["_value"] for row in rows if "samples" in row],
        "alerts": [alert["title"] for alert in run.alerts()],
    }


if __name__ == "__main__":
    main(Path(sys.argv[1]))
