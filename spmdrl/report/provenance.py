"""Records what a run was made with: config, package versions, git revision, machine."""

from __future__ import annotations

import json
import logging
import os
import platform
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from spmdrl import config
from spmdrl.config import Config
from spmdrl.imports import attempt, installed_versions
from spmdrl.run_folder import write_file
from spmdrl.same_run.user_code import digest, started_program, user_files
from spmdrl.world.own_runs import mark_own

log = logging.getLogger(__name__)


def describe_environment() -> dict[str, Any]:
    """Return package versions, git revision, command line and machine, as JSON data."""
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {
        "command": sys.argv,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "host": platform.node(),
        "cpus": os.cpu_count(),
        "gpus": gpus,
        "cuda": torch.version.cuda,
        "packages": installed_versions(),
        "git": git_revision(Path(__file__).resolve().parents[2]),
    }


def describe_code(cfg: Config) -> dict[str, Any]:
    """Return path and git revision of the program, and the digests of the user's files, as JSON
    data."""
    files = user_files(cfg)
    program = started_program()
    return {
        "program": str(program) if program else None,
        "program_git": git_revision(program.parent, files.values()) if program else None,
        "code": {name: digest(path) for name, path in files.items()},
    }


def git_revision(folder: Path, files: Iterable[Path] = ()) -> dict[str, Any] | None:
    """Return {commit, changed files} of the checkout that holds `folder`; None outside one.

    Args:
        files: listed if they differ from the commit. Of other untracked folders only the folder
            is listed.
    """
    commit = _git(folder, "rev-parse", "HEAD")
    root = _git(folder, "rev-parse", "--show-toplevel")
    if commit is None or root is None:
        return None
    changed = _git(folder, "status", "--porcelain") or ""
    inside = [str(path) for path in files if Path(root) in path.parents]
    if inside:
        own = _git(folder, "status", "--porcelain", "--untracked-files=all", "--", *inside)
        changed += f"\n{own or ''}"
    names = dict.fromkeys(line[3:] for line in changed.splitlines() if line)
    return {"commit": commit, "changed_files": [*names]}


def _git(folder: Path, *words: str) -> str | None:
    command = ["git", "-C", str(folder), *words]
    done, _error = attempt(
        lambda: subprocess.run(command, capture_output=True, text=True, timeout=10),
        (OSError, subprocess.TimeoutExpired),  # no git here, or a hanging file system
    )
    return done.stdout.rstrip("\n") if done and done.returncode == 0 else None


def save_environment(cfg: Config, *, folder: Path, attempt_folder: Path) -> dict[str, Any]:
    """Write config.yaml, environment.json and the program (as program.py); return the environment.

    The copies in `attempt_folder` stay if a later attempt resumes with another config.
    """
    environment = describe_environment() | describe_code(cfg)
    program = started_program()
    if program is not None:
        write_file(attempt_folder / "program.py", program.read_bytes(), within=folder)
    texts = {
        "config.yaml": config.dump(cfg),
        "environment.json": json.dumps(environment, indent=2) + "\n",
    }
    for name, text in texts.items():
        write_file(attempt_folder / name, text, within=folder)
        write_file(folder / name, text)
    if why := mark_own(folder / "config.yaml"):
        log.warning("the run is not marked as your own, so that commands ask for trust: %s", why)
    return environment
