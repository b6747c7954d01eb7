"""Weights & Biases as a tracker."""

from __future__ import annotations

import logging
import os
import secrets
import shutil
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from spmdrl.config import WandbSettings
from spmdrl.imports import attempt
from spmdrl.report.tracker import MetricsRow, Status
from spmdrl.report.trackers.helpers import columns_of, remember_run, remembered_run

log = logging.getLogger(__name__)

# W&B shows a run that ends with 255 as killed.
_EXIT_CODES = {"finished": 0, "stopped": 255, "failed": 1}
_FINISH_S = 25.0  # below the time that a run waits for its trackers


class WandbTracker:
    """One W&B run; see `tracker.Tracker`.

    W&B's own steps can only grow, and a resumed run takes some steps again. So each row has its
    step as the metric `step`, over which W&B draws the others.

    Args:
        settings: the section of the config.
        folder: the run's output_dir, in which a file keeps the W&B run's id.
        own_name: name of the run, if the settings give none.
    """

    def __init__(self, settings: WandbSettings, *, folder: Path, own_name: str):
        self._settings = settings
        self._folder = folder
        self._place = Path(settings.dir or folder).resolve()
        self._run_name = settings.name or own_name
        self._run: Any = None
        self.run_id = ""
        self.name = f"W&B ({settings.mode}, project {settings.project})"
        self.view_command = f"{self.name}: the log names its page when it is open"
        if settings.mode == "offline":
            self.view_command = f"wandb sync {self._place}/wandb/offline-run-*"
        _import_wandb()  # in the main thread, as MLflow

    def start(self, params: Mapping[str, Any], tags: Mapping[str, str], *, step: int) -> None:
        """Open a W&B run; if `step` is above 0, the one whose id the folder keeps."""
        import wandb

        own = self._settings
        where = {"entity": own.entity, "project": own.project}
        known = remembered_run(self._folder, "wandb") if step else {}
        if not self.run_id:
            is_same = {name: known.get(name) for name in where} == where
            self.run_id = str(known.get("run_id")) if is_same else secrets.token_hex(4)
        remember_run(self._folder, "wandb", where | {"run_id": self.run_id})
        self._place.mkdir(parents=True, exist_ok=True)
        self._run = wandb.init(
            project=own.project,
            entity=own.entity or None,
            name=self._run_name,
            id=self.run_id,
            group=own.group or None,
            tags=own.tags,
            mode=own.mode,
            dir=str(self._place),
            resume="allow",
            config={**params, **tags},
            allow_val_change=True,
            settings=wandb.Settings(
                console="off",  # the run's own logs have it
                silent=True,
                symlink=False,
                finish_timeout=_FINISH_S,
                finish_timeout_raises=True,
            ),
        )
        self._run.define_metric("*", step_metric="step")
        if own.mode == "online":
            log.info("W&B shows the run at %s", self._run.url)

    def metrics(self, rows: Sequence[MetricsRow]) -> None:
        """Log steps, in order."""
        for row in rows:
            self._run.log({**row.values, "step": row.step, "_timestamp": row.unix_s})

    def table(self, name: str, rows: Sequence[Mapping[str, Any]]) -> None:
        """Show rows as a table of the newest row's step."""
        import wandb

        columns, data = columns_of(rows)
        table = wandb.Table(columns=columns, data=data, allow_mixed_types=True)
        self._run.log({name.removesuffix(".json"): table, "step": rows[-1]["step"]})

    def artifact(self, path: Path) -> None:
        """Store a copy of a file with the run."""
        # `save` only links what is elsewhere. W&B has a config.yaml of its own.
        copy = Path(self._run.dir) / "run" / path.name
        copy.parent.mkdir(exist_ok=True)
        shutil.copyfile(path, copy)
        self._run.save(str(copy), base_path=self._run.dir, policy="now")

    def close(self, status: Status) -> None:
        """End the W&B run."""
        self._run.finish(exit_code=_EXIT_CODES[status])


def key_problem() -> str:
    """Return that W&B has no key, or one of a wrong form; else nothing. No server is asked."""
    _import_wandb()
    import wandb
    from wandb.sdk.lib.wbauth import authenticate_session

    host = wandb.setup().settings.base_url
    # The public `wandb.login` asks the server, or a person.
    find = partial(
        authenticate_session, host=host, source="spmdrl", prompt=False, update_session=False
    )
    found, error = attempt(find, wandb.errors.AuthenticationError)
    if found:
        return ""
    return (
        f"report.wandb.mode: online, and {error or 'there is no key'} for {host}; run "
        "`wandb login`, set WANDB_API_KEY in the environment of the ranks, or take offline"
    )


def _import_wandb() -> None:
    # W&B sends errors of its own to its makers unless this is set before its first import.
    os.environ["WANDB_ERROR_REPORTING"] = "false"
    import wandb  # noqa: F401
