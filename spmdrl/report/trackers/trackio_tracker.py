"""Trackio as a tracker."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from spmdrl.config import TrackioSettings
from spmdrl.errors import Refusal
from spmdrl.report.tracker import MetricsRow, Status
from spmdrl.report.trackers.helpers import remember_run, remembered_run


class TrackioTracker:
    """One run in Trackio's store on this machine; see `tracker.Tracker`.

    It writes metrics to the store itself. `trackio.Run` writes them from a thread of its own, which
    drops what it cannot write and only warns.

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
        self._run = LocalRun(
            url=None,
            project=own.project,
            client=None,
            name=self._run_name,
            run_id=self.run_id,
            group=own.group or None,
            config={**params, **tags},
        )
        self._step = step

    def metrics(self, rows: Sequence[MetricsRow]) -> None:
        """Log steps, in order. Rows that the store has already are left out."""
        self._write(
            [dict(row.values) for row in rows],
            steps=[row.step for row in rows],
            times=[row.unix_s for row in rows],
            kind="metrics",
        )
        self._step = rows[-1].step

    def table(self, name: str, rows: Sequence[Mapping[str, Any]]) -> None:
        """Show rows as a table of the newest row's step."""
        import trackio

        table = {"_type": trackio.Table.TYPE, "_value": [dict(row) for row in rows]}
        values = {name.removesuffix(".json"): table}
        self._write([values], steps=[rows[-1]["step"]], times=[time.time()], kind=name)

    def artifact(self, path: Path) -> None:
        """Store a copy of a file with the run."""
        self._run.log_artifact(path, name=path.name, type="file")

    def close(self, status: Status) -> None:
        """Add an alert that says how the run ended."""
        import trackio
        from trackio.sqlite_storage import SQLiteStorage

        level = trackio.AlertLevel.ERROR if status == "failed" else trackio.AlertLevel.INFO
        SQLiteStorage.bulk_alert(
            self._settings.project,
            self._run_name,
            titles=[status],
            texts=[None],
            levels=[level.value],
            steps=[self._step],
            run_id=self.run_id,
        )

    def _write(
        self, values: list[dict[str, Any]], *, steps: list[int], times: list[float], kind: str
    ) -> None:
        from trackio.sqlite_storage import SQLiteStorage

        SQLiteStorage.bulk_log(
            self._settings.project,
            self._run_name,
            metrics_list=values,
            steps=steps,
            timestamps=[datetime.fromtimestamp(unix_s, UTC).isoformat() for unix_s in times],
            config=self._run.config,
            log_ids=[f"{self.run_id}-{kind}-{step}-{at}" for step, at in zip(steps, times)],
            run_id=self.run_id,
        )


def _import_trackio(place: Path) -> None:
    os.environ["TRACKIO_DIR"] = str(place)  # read as it is imported
    import trackio

    if place != trackio.TRACKIO_DIR:
        raise Refusal(
            f"report.trackers: trackio writes to {trackio.TRACKIO_DIR} in this process and not to "
            f"{place}; import it nowhere before the run, or set report.trackio.dir to its folder"
        )
