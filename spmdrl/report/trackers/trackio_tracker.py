"""Trackio as a tracker."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from spmdrl.config import TrackioSettings
from spmdrl.errors import Refusal
from spmdrl.report.tracker import MetricsRow, Status
from spmdrl.report.trackers.helpers import columns_of, remember_run, remembered_run


class TrackioTracker:
    """One run in Trackio's store on this machine; see `tracker.Tracker`.

    Args:
        settings: the section of the config.
        folder: the run's output_dir, in which a file keeps the Trackio run's id.
        own_name: name of the run, if the settings give none.
    Raises: Refusal when Trackio is imported already, for another store.
    """

    def __init__(self, settings: TrackioSettings, *, folder: Path, own_name: str):
        self._settings = settings
        self._folder = folder
        self._run_name = settings.name or own_name
        self._run: Any = None
        self.run_id = ""
        place = Path(settings.dir or folder / "trackio").resolve()
        self.name = f"Trackio in {place}"
        self.view_command = f"TRACKIO_DIR={place} trackio show --project {settings.project}"
        _import_trackio(place)  # in the main thread, as MLflow

    def start(self, params: Mapping[str, Any], tags: Mapping[str, str], *, step: int) -> None:
        """Open a Trackio run; if `step` is above 0, the one whose id the folder keeps."""
        import trackio

        class LocalRun(trackio.Run):
            """A run that asks no server whose token this machine has."""

            def _get_username(self) -> None:
                return None

        own = self._settings
        known = remembered_run(self._folder, "trackio") if step else {}
        if not self.run_id:
            is_same = known.get("project") == own.project
            self.run_id = str(known.get("run_id")) if is_same else secrets.token_hex(16)
        remember_run(self._folder, "trackio", {"project": own.project, "run_id": self.run_id})
        # Not by `trackio.init`: it finds runs by name, and takes a server from variables.
        self._run = LocalRun(
            url=None,
            project=own.project,
            client=None,
            name=self._run_name,
            run_id=self.run_id,
            group=own.group or None,
            config={**params, **tags},
            auto_log_cpu=True,
            auto_log_gpu=True,
        )

    def metrics(self, rows: Sequence[MetricsRow]) -> None:
        """Log steps, in order."""
        for row in rows:
            self._run.log(dict(row.values), step=row.step)

    def table(self, name: str, rows: Sequence[Mapping[str, Any]]) -> None:
        """Show rows as a table of the newest row's step."""
        import trackio

        columns, data = columns_of(rows)
        table = trackio.Table(columns=columns, data=data)
        self._run.log({name.removesuffix(".json"): table}, step=rows[-1]["step"])

    def artifact(self, path: Path) -> None:
        """Store a copy of a file with the run."""
        self._run.log_artifact(path, name=path.name, type="file")

    def close(self, status: Status) -> None:
        """End the run, with an alert that says how it ended."""
        import trackio

        level = trackio.AlertLevel.ERROR if status == "failed" else trackio.AlertLevel.INFO
        self._run.alert(status, level=level)
        self._run.finish()


def _import_trackio(place: Path) -> None:
    os.environ["TRACKIO_DIR"] = str(place)  # read as it is imported
    import trackio

    if place != trackio.TRACKIO_DIR:
        raise Refusal(
            f"report.trackers: trackio writes to {trackio.TRACKIO_DIR} in this process and not to "
            f"{place}; import it nowhere before the run, or set report.trackio.dir to its folder"
        )
