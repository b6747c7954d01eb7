"""Remove old checkpoints, but not the last ones, nor the best one by a metric of the evaluation.

Every manifest has the evaluation of its own weights, so the best of the complete checkpoints is
known at any moment. `checkpoints/best` is a link to it, for people and other programs.
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


def best_of(folders: Iterable[Path], keep: KeepSettings) -> Path | None:
    """Return the best of complete checkpoints, the earliest of equal ones; None if there are none.

    Checkpoints that were not evaluated, or whose manifest cannot be read, are left out.
    """
    best = None
    best_value = math.nan
    for folder in sorted(folders, key=disk.step_of):
        value = _value(folder, keep)
        if _is_better(value, best_value, keep):
            best = folder
            best_value = value
    return best


def is_new_best(root: Path, keep: KeepSettings, values: Mapping[str, float]) -> bool:
    """Return whether an evaluation is better than those of all complete checkpoints."""
    old = best_of(disk.complete_checkpoints(root), keep)
    old_value = _value(old, keep) if old else math.nan
    return _is_better(values.get(keep.best, math.nan), old_value, keep)


def _value(folder: Path, keep: KeepSettings) -> float:
    """Return a checkpoint's value of the metric; NaN where it has none."""
    content, _ = attempt(lambda: disk.read_manifest(folder))
    return content.evaluated.get(keep.best, math.nan) if content and keep.best else math.nan


def _is_better(value: float, than: float, keep: KeepSettings) -> bool:
    # NaN stands for a missing value, and any number is better.
    if math.isnan(value) or math.isnan(than):
        return not math.isnan(value)
    return value > than if keep.mode == "max" else value < than


def prune(root: Path, keep: KeepSettings) -> None:
    """Remove the checkpoints that are neither among the last ones nor the best. Raises: OSError."""
    link_best(root, keep)  # first, so that it never names a removed folder
    folders = disk.complete_checkpoints(root)
    best = best_of(folders, keep)
    for old in folders[keep.last :]:
        if old == best:
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
    if link.exists() and not link.is_symlink():  # such as a copy that followed the link
        aside = root / f"{BEST}.aside"
        disk.remove(aside)
        disk.rename(link, aside)
        log.warning("%s is no link; it is set aside as %s", link, aside)
    if best is None:
        disk.remove(link)
        return
    if link.is_symlink() and os.readlink(link) == best.name:
        return
    # No call replaces a link's target, so a new link is renamed over the old one.
    new = root / f"{BEST}.partial"
    disk.remove(new)
    new.symlink_to(best.name)
    disk.rename(new, link)
    disk.sync_folder(root)


def named(path: Path, which: str) -> Path:
    """Return the path that `--which` selects: `path` itself for `last`, else the best checkpoint.

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
