"""Which checkpoints stay and which are removed: the last ones stay, and the best by a metric of the
in-loop evaluation.

Every manifest has the evaluation of its own weights, so which is best follows from the complete
checkpoints that are there, at any moment. `checkpoints/best` is a link to it, for people and other
programs.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

import spmdrl.checkpoint.manifest as disk
from spmdrl.config import Config, KeepSettings
from spmdrl.errors import Refusal
from spmdrl.imports import attempt, nearest

log = logging.getLogger(__name__)

BEST = "best"
"""Name of the link."""


def check_measured(cfg: Config, values: Mapping[str, float]) -> None:
    """Refuse a metric that an evaluation did not give.

    Args:
        values: {metric: value} of the first evaluation; empty for none.
    Raises: Refusal naming the nearest one.
    """
    name = cfg.checkpoint.keep.best
    if name and values and name not in values:
        raise Refusal(
            f"checkpoint.keep.best: the evaluation gives no {name}{nearest(name, values)}"
        )


# --------------------------------------------------------------------------- on disk


def best_of(folders: Iterable[Path], keep: KeepSettings) -> Path | None:
    """Return the best of complete checkpoints; of equal ones the earliest, None of none.

    Checkpoints that were not evaluated, or whose manifest cannot be read, are none.
    """
    if not keep.best:
        return None
    found = [
        (value, folder)
        for folder in sorted(folders, key=disk.step_of)
        if not math.isnan(value := _value(folder, keep.best))
    ]
    if not found:
        return None
    pick = max if keep.mode == "max" else min
    return pick(found, key=lambda pair: pair[0])[1]  # of equal ones the first


def is_new_best(root: Path, keep: KeepSettings, values: Mapping[str, float]) -> bool:
    """Return whether an evaluation is better than that of every checkpoint there is."""
    value = values.get(keep.best, math.nan)
    if math.isnan(value):
        return False
    old = best_of(disk.complete_checkpoints(root), keep)
    if old is None:
        return True
    had = _value(old, keep.best)
    return value > had if keep.mode == "max" else value < had


def _value(folder: Path, metric: str) -> float:
    content, _ = attempt(lambda: disk.read_manifest(folder))
    return content.evaluated.get(metric, math.nan) if content else math.nan


def kept(root: Path, keep: KeepSettings) -> list[Path]:
    """Return the checkpoints that stay: the newest, and the best."""
    folders = disk.complete_checkpoints(root)
    best = best_of(folders, keep)
    newest = folders[: keep.last]
    return newest if best is None or best in newest else [*newest, best]


def prune(root: Path, keep: KeepSettings) -> None:
    """Remove the checkpoints that do not stay. Raises: OSError."""
    link_best(root, keep)  # first: it never names what is gone
    stay = kept(root, keep)
    for old in disk.complete_checkpoints(root):
        if old in stay:
            continue
        # Renamed first, so that a kill in the middle leaves nothing that looks complete.
        doomed = old.with_name(old.name + ".partial")
        disk.remove(doomed)
        disk.rename(old, doomed)
        disk.remove(doomed)


def link_best(root: Path, keep: KeepSettings) -> None:
    """Let `best` name the best checkpoint, by one rename. Raises: OSError."""
    best = best_of(disk.complete_checkpoints(root), keep)
    link = root / BEST
    if link.exists() and not link.is_symlink():  # a copy that followed the link, say
        aside = root / f"{BEST}.aside"
        disk.remove(aside)
        disk.rename(link, aside)
        log.warning("%s is no link; it is set aside as %s", link, aside)
    if best is None:
        disk.remove(link)
        return
    if link.is_symlink() and os.readlink(link) == best.name:
        return
    made = root / f"{BEST}.partial"
    disk.remove(made)
    made.symlink_to(best.name)
    disk.rename(made, link)
    disk.sync_folder(root)


def named(path: Path, which: str) -> Path:
    """Return what `--which` means of a run's folder: itself for `last`, its best checkpoint.

    Raises: Refusal when the run keeps no best one.
    """
    if which == "last":
        return path
    for root in (disk.checkpoints_folder(path), path):
        if (root / BEST / disk.NAME).is_file():
            return (root / BEST).resolve()
    raise Refusal(
        f"{path} has no checkpoints/{BEST}: the run kept none by a metric; set "
        "checkpoint.keep.best, e.g. to eval/reward, or leave out --which best"
    )
