"""MLflow as a tracker."""

from __future__ import annotations

import json
import logging
import os
import re
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from spmdrl.report.tracker import MetricsRow, Status
from spmdrl.report.trackers.helpers import columns_of, remember_run, remembered_run
from spmdrl.run_folder import remove, rename

log = logging.getLogger(__name__)

_MLFLOW_STATUS = {"finished": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}

_SQLITE = "sqlite:///"
_TABLE_TAG = "mlflow.loggedArtifacts"
_MAX_METRICS = 1000  # of one log_batch, as are the next two
_MAX_PARAMS = 100
_MAX_PARAM_CHARS = 6000


class MlflowTracker:
    """One MLflow run; see `tracker.Tracker`.

    Creating the SQLite store takes 2 s and logging a step of 50 metrics 10 ms (two cores, measured
    alone).

    Args:
        uri: tracking URI; empty means the file mlflow.db in `folder`.
        folder: the run's output_dir, in which a file keeps the MLflow run's id.
        experiment, run_name: as MLflow shows them.
        system_every_s: seconds between two samples of MLflow's system metrics.
    """

    def __init__(
        self,
        uri: str,
        *,
        folder: Path,
        experiment: str,
        run_name: str,
        system_every_s: float = 10.0,
    ):
        self._is_own = not uri
        self.uri = uri or f"sqlite:///{folder.resolve() / 'mlflow.db'}"
        self.name = f"MLflow at {self.uri}"
        self.view_command = f"mlflow ui --backend-store-uri {self.uri}"
        is_file = self.uri.startswith(_SQLITE) and "?" not in self.uri
        file = self.uri.removeprefix(_SQLITE) if is_file else ""
        self._file = Path(file) if file else None  # of a store that is one
        self._folder = folder
        self._experiment = experiment
        self._run_name = run_name
        self._system_every_s = system_every_s
        self._client: Any = None
        self._monitor: Any = None
        self._takes_artifacts = False
        self.run_id = ""
        # Import it here, in the main thread: two threads that import large packages at once can get
        # half-imported modules. It takes 1.5 s, on rank 0 only.
        _import_mlflow()

    def start(self, params: Mapping[str, Any], tags: Mapping[str, str], *, step: int) -> None:
        """Open an MLflow run; if `step` is above 0, the one whose id the folder keeps.

        A parameter that the run already has with another value becomes a tag.
        """
        if self._client is None:
            self._open_run({f"mlflow.{name}": tag for name, tag in tags.items()}, resume=step > 0)
        self._log_params(params, step=step)

    def metrics(self, rows: Sequence[MetricsRow]) -> None:
        """Log steps in few transactions."""
        from mlflow.entities import Metric

        points = [
            Metric(_clean(name), value, int(row.unix_s * 1000), row.step)
            for row in rows
            for name, value in row.values.items()
        ]
        for start in range(0, len(points), _MAX_METRICS):
            self._client.log_batch(self.run_id, metrics=points[start : start + _MAX_METRICS])

    def table(self, name: str, rows: Sequence[Mapping[str, Any]]) -> None:
        """Show rows as the table artifact `name`."""
        if not self._takes_artifacts:
            return
        columns, data = columns_of(rows)
        text = json.dumps({"columns": columns, "data": data}, default=str)
        self._client.log_text(self.run_id, text, name)
        entries = [{"path": name, "type": "table"}]
        self._client.set_tag(self.run_id, _TABLE_TAG, json.dumps(entries))

    def artifact(self, path: Path) -> None:
        """Store a copy of a file with the run."""
        if self._takes_artifacts:
            self._client.log_artifact(self.run_id, str(path))

    def close(self, status: Status) -> None:
        """End the MLflow run."""
        self._monitor.finish()
        self._client.set_terminated(self.run_id, _MLFLOW_STATUS[status])

    def _log_params(self, params: Mapping[str, Any], *, step: int) -> None:
        from mlflow.entities import Param

        texts = {_clean(name): str(value)[:_MAX_PARAM_CHARS] for name, value in params.items()}
        known = self._client.get_run(self.run_id).data.params
        new = [Param(name, text) for name, text in texts.items() if name not in known]
        for start in range(0, len(new), _MAX_PARAMS):
            self._client.log_batch(self.run_id, params=new[start : start + _MAX_PARAMS])
        for name, text in texts.items():
            if known.get(name, text) != text:  # parameters of a run cannot change in MLflow
                self._client.set_tag(self.run_id, f"from_step_{step}.{name}", text)

    def _open_run(self, tags: dict[str, str], *, resume: bool) -> None:
        from mlflow.system_metrics.system_metrics_monitor import SystemMetricsMonitor
        from mlflow.tracking import MlflowClient

        if self._file is not None:
            _create_store(self._file)
        client = MlflowClient(self.uri)
        if not self.run_id and resume:
            self.run_id = self._known_run(client)
        if not self.run_id:
            self.run_id = self._new_run(client, tags)
        client.update_run(self.run_id, status="RUNNING")
        file = {"uri": self.uri, "experiment": self._experiment, "run_id": self.run_id}
        remember_run(self._folder, "mlflow", file)
        self._takes_artifacts = not (self._is_own and self._leads_away(client))
        self._monitor = SystemMetricsMonitor(
            self.run_id,
            sampling_interval=self._system_every_s,
            resume_logging=True,
            tracking_uri=self.uri,
        )
        self._monitor.start()
        self._client = client

    def _leads_away(self, client: Any) -> bool:
        """Return whether the store in the run's folder writes files outside it: it was moved, or is
        somebody else's."""
        own = (self._folder.resolve() / "mlflow_artifacts").as_uri()
        place = client.get_run(self.run_id).info.artifact_uri
        if place.startswith(f"{own}/") and ".." not in unquote(place).split("/"):
            return False
        log.warning(
            "MLflow's store in %s keeps its files in %s, which is not below it; no file is added "
            "there: name the store by report.mlflow.uri if it is yours",
            self._folder,
            place,
        )
        return True

    def _known_run(self, client: Any) -> str:
        """Return the id that the folder keeps of a run in this store; empty for none."""
        from mlflow.exceptions import MlflowException

        file = remembered_run(self._folder, "mlflow")
        if file.get("uri") != self.uri:
            return ""
        try:
            info = client.get_run(file["run_id"]).info
        except MlflowException as error:
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise
            info = None
        if info is None or info.lifecycle_stage == "deleted":
            log.warning(
                "MLflow run %s is gone from %s; a new one is made", file["run_id"], self.uri
            )
            return ""
        return file["run_id"]

    def _new_run(self, client: Any, tags: dict[str, str]) -> str:
        experiment = client.get_experiment_by_name(self._experiment)
        number = self._new_experiment(client) if experiment is None else experiment.experiment_id
        return client.create_run(number, run_name=self._run_name, tags=tags).info.run_id

    def _new_experiment(self, client: Any) -> str:
        from mlflow.exceptions import MlflowException

        place = None
        if self._file is not None:  # not in whatever folder the program was started from
            place = (self._file.resolve().parent / "mlflow_artifacts").as_uri()
        try:
            return client.create_experiment(self._experiment, artifact_location=place)
        except MlflowException as error:
            if error.error_code != "RESOURCE_ALREADY_EXISTS":
                raise
            return client.get_experiment_by_name(self._experiment).experiment_id  # another run's


def _create_store(path: Path) -> None:
    """Make a store that is one file, unless it exists."""
    from mlflow.tracking import MlflowClient

    if path.exists():
        return
    # Make it under another name first: a process that ends while MLflow makes tables would leave
    # a file that MLflow refuses from then on, and other runs may make the same store now.
    path.parent.mkdir(parents=True, exist_ok=True)
    host = socket.gethostname()
    for left in path.parent.glob(f"{path.name}.partial-{host}-*"):
        if not os.path.exists(f"/proc/{left.name.rpartition('-')[2]}"):
            remove(left)  # of a process that was killed here
    partial = path.with_name(f"{path.name}.partial-{host}-{os.getpid()}")
    remove(partial)
    MlflowClient(f"{_SQLITE}{partial.resolve()}")
    try:
        os.link(partial, path)
    except FileExistsError:  # another run made it meanwhile
        pass
    except OSError:  # a file system without links
        rename(partial, path)
    remove(partial)


def tracking_uri(folder: Path | None) -> str:
    """Return the tracking URI of the MLflow run of an output_dir; empty for none."""
    return "" if folder is None else str(remembered_run(folder, "mlflow").get("uri", ""))


def log_files(folder: Path | None, files: list[Path]) -> str:
    """Add files to the MLflow run of an output_dir.

    The folder's file says where that run is. If the folder may be somebody else's, look at its
    `tracking_uri` first.

    Returns: the tracking URI; empty if there is no such run.
    Raises: any error of MLflow's client.
    """
    remembered = {} if folder is None else remembered_run(folder, "mlflow")
    if not remembered:
        return ""
    _import_mlflow()
    from mlflow.tracking import MlflowClient

    client = MlflowClient(remembered["uri"])
    for path in files:
        client.log_artifact(remembered["run_id"], str(path))
    return remembered["uri"]


def _clean(name: str) -> str:
    return re.sub(r"[^\w./ :-]", "_", name, flags=re.ASCII)[:250]


def _import_mlflow() -> None:
    # MLflow sends usage data to its makers unless this is set before its first import. Training
    # clusters often have no internet, and a run is its owner's business.
    os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"
    from mlflow.environment_variables import (
        MLFLOW_HTTP_REQUEST_MAX_RETRIES,
        MLFLOW_HTTP_REQUEST_TIMEOUT,
    )

    # The thread retries by itself; MLflow's own 7 retries would hide a dead server for minutes.
    for setting, value in ((MLFLOW_HTTP_REQUEST_MAX_RETRIES, 1), (MLFLOW_HTTP_REQUEST_TIMEOUT, 20)):
        if not setting.is_set():
            setting.set(value)
    for name in ("mlflow", "alembic"):
        logging.getLogger(name).setLevel(logging.WARNING)
