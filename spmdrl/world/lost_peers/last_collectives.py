"""The last collectives of a rank, from torch's flight recorder, for a wait that did not end."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from spmdrl.run_folder import make_folder, write_file
from spmdrl.world.torch_internals import flight_record

_SHOWN = 64


def leave_record(folder: Path | None, *, rank: int) -> str:
    """Write the collectives that this rank entered last, as text and in the form of `torchfrtrace`.

    Returns: a line for the rank's last message that says where; empty without a folder.
    """
    if folder is None:
        return ""
    path = folder / f"collectives_{rank}.txt"
    try:
        make_folder(folder, within=folder.parent)
        record = flight_record()
        write_file(folder / f"rank_{rank}", record, within=folder.parent)
        write_file(path, text_of(record), within=folder.parent)
    except OSError as error:  # a full disk must not keep a rank that is lost
        return f"its last collectives could not be written to {path}: {error}\n"
    return f"its last collectives: {path}\n"


def text_of(record: bytes) -> str:
    """Return a line for each of the last collectives, the newest last.

    It has group, number in the group, state, kind, sizes, and the line of code outside torch.
    """
    entries = pickle.loads(record).get("entries", [])[-_SHOWN:]
    return "".join(f"{_line(entry)}\n" for entry in entries) or "no collectives were recorded\n"


def _line(entry: Mapping[str, Any]) -> str:
    own = (f for f in entry.get("frames", ()) if "/torch/" not in f["filename"])
    caller = next((f"{f['filename']}:{f['line']} {f['name']}" for f in own), "?")
    group = entry["process_group"][0]
    number = entry["collective_seq_id"]
    what = f"{entry['profiling_name']} {entry['input_sizes']}"
    return f"group {group} number {number}  {entry['state']:<10} {what}  {caller}"
