"""Which checkpoints stay: the last ones, and the best by a metric of the in-loop evaluation.

Every manifest has the evaluation of its own weights, so which is best follows from the complete
checkpoints that are there, at any moment. `checkpoints/best` is a link to it, for people and other
programs.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from spmdrl.checkpoint import manifest as disk
from spmdrl.config import Config
from spmdrl.imports import nearest

KEEP: dict[str, Any] = {"last": 2, "best": "", "mode": "max"}
"""What checkpoint.keep may hold, with the defaults; `best` is a metric, empty for none."""
BEST = "best"
"""Name of the link."""


def keep_problems(cfg: Config) -> list[str]:
    """Return what is wrong with checkpoint.keep, as far as it shows before the first evaluation."""
    given = cfg.checkpoint.keep
    problems = [
        f"{name}: unknown option{nearest(name, KEEP)}" for name in given if name not in KEEP
    ]
    chosen = KEEP | given
    if type(chosen["last"]) is not int or chosen["last"] < 1:
        problems.append(
            f"last: expected a number of checkpoints, 1 or more, got "
            f"{chosen['last']!r}; a resumed run goes on from the last one"
        )
    if chosen["mode"] not in ("max", "min"):
        problems.append(f"mode: expected max or min, got {chosen['mode']!r}")
    if "mode" in given and "best" not in given:
        problems.append(f"mode: {chosen['mode']!r} without best, the metric that it is about")
    if "best" in given:
        problems += _metric_problems(cfg, chosen["best"])
    return problems


def _metric_problems(cfg: Config, name: Any) -> list[str]:
    known = _usual_metrics(cfg.evaluate.samples)
    if not isinstance(name, str) or not name.startswith("eval/") or not _is_metric(name):
        return [
            f"best: expected a metric of the evaluation, got {name!r}{nearest(str(name), known)}"
        ]
    if name.split("_at_")[0] in ("eval/pass", "eval/maj") and name not in known:
        return [
            f"best: {name} is not measured with evaluate.samples {cfg.evaluate.samples}"
            f"{nearest(name, known)}"
        ]
    if not cfg.layout.roles.has_engines:
        return [
            f"best: {name} is measured by sampling held-out problems, and under placement "
            "offline nothing samples; take it out"
        ]
    if not cfg.evaluate.every_steps:
        return [
            f"best: {name}, but evaluate.every_steps is 0, so nothing measures it; set that "
            "(a new best is saved when it is found, whatever checkpoint.every_steps says)"
        ]
    return []


def _is_metric(name: str) -> bool:
    from spmdrl.report.glossary import lookup

    try:
        lookup(name)
    except ValueError:
        return False
    return True


def _usual_metrics(samples: int) -> list[str]:
    """Return the metrics that every evaluation has, or may have."""
    from spmdrl.rollout.outcomes import sizes

    names = ["reward", "response_length", "truncated_frac", "failed_frac"]
    if samples > 1:
        names += [f"pass_at_{k}" for k in sizes(samples)] + [f"maj_at_{samples}"]
    return [f"eval/{name}" for name in names]


def check_measured(cfg: Config, values: Mapping[str, float]) -> None:
    """Refuse a metric that an evaluation did not give.

    Args:
        values: {metric: value} of the first evaluation; empty for none.
    Raises: ValueError naming the nearest one.
    """
    name = cfg.checkpoint.keep.get("best", "")
    if name and values and name not in values:
        raise ValueError(
            f"checkpoint.keep.best: the evaluation gives no {name}{nearest(name, values)}"
        )


# --------------------------------------------------------------------------- on disk


def best_of(folders: Iterable[Path], keep: Mapping[str, Any]) -> Path | None:
    """Return the best of complete checkpoints; of equal ones the earliest, None of none.

    Checkpoints that were not evaluated, or whose manifest cannot be read, are none.
    """
    chosen = KEEP | keep
    if not chosen["best"]:
        return None
    found = [
        (value, folder)
        for folder in sorted(folders, key=disk.step_of)
        if not math.isnan(value := _value(folder, chosen["best"]))
    ]
    if not found:
        return None
    pick = max if chosen["mode"] == "max" else min
    return pick(found, key=lambda pair: pair[0])[1]  # of equal ones the first


def is_new_best(root: Path, keep: Mapping[str, Any], values: Mapping[str, float]) -> bool:
    """Return whether an evaluation is better than that of every checkpoint there is."""
    chosen = KEEP | keep
    value = values.get(chosen["best"], math.nan)
    if math.isnan(value):
        return False
    old = best_of(disk.complete_checkpoints(root), keep)
    if old is None:
        return True
    had = _value(old, chosen["best"])
    return value > had if chosen["mode"] == "max" else value < had


def _value(folder: Path, metric: str) -> float:
    try:
        return disk.read_manifest(folder).evaluated.get(metric, math.nan)
    except ValueError:
        return math.nan


def kept(root: Path, keep: Mapping[str, Any]) -> list[Path]:
    """Return the checkpoints that stay: the newest, and the best."""
    folders = disk.complete_checkpoints(root)
    best = best_of(folders, keep)
    newest = folders[: (KEEP | keep)["last"]]
    return newest if best is None or best in newest else [*newest, best]


def link_best(root: Path, keep: Mapping[str, Any]) -> None:
    """Let `best` name the best checkpoint, by one rename. Raises: OSError."""
    best, link = best_of(disk.complete_checkpoints(root), keep), root / BEST
    if best is None:
        link.unlink(missing_ok=True)
        return
    if link.is_symlink() and os.readlink(link) == best.name:
        return
    made = root / f"{BEST}.partial"
    made.unlink(missing_ok=True)
    made.symlink_to(best.name)
    os.replace(made, link)
    disk.sync_folder(root)


def named(path: Path, which: str) -> Path:
    """Return what `--which` means of a run's folder: itself for `last`, its best checkpoint.

    Raises: ValueError when the run keeps no best one.
    """
    if which == "last":
        return path
    for root in (disk.checkpoints_folder(path), path):
        if (root / BEST / disk.NAME).is_file():
            return (root / BEST).resolve()
    raise ValueError(
        f"{path} has no checkpoints/{BEST}: the run kept none by a metric; set "
        "checkpoint.keep, e.g. {best: eval/reward}, or leave out --which best"
    )
