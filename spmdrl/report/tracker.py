"""MLflow, from a thread of its own, so that training never waits for it.

Creating the SQLite store takes 2 s and logging a step of 50 metrics 10 ms (two cores, measured
alone), so the thread does both; a step costs the loop only an append to a queue. A tracker
that is down is said once, tried again every minute, and otherwise ignored: metrics.jsonl has
everything.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import re
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple
from urllib.parse import unquote

from spmdrl.imports import attempt, parsed_json
from spmdrl.run_folder import remove, rename, write_file

log = logging.getLogger(__name__)

Status = Literal["finished", "stopped", "failed"]
_MLFLOW_STATUS = {"finished": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}

_RUN_FILE = "mlflow_run.json"
_SQLITE = "sqlite:///"
_TABLE_TAG = "mlflow.loggedArtifacts"
_GATHER_S = 1.0  # steps of this long go into one transaction
_RETRY_S = 60.0
_MAX_WAITING = 50_000  # items, of about 5 kB each; the oldest are dropped
_MAX_METRICS, _MAX_PARAMS, _MAX_PARAM_CHARS = 1000, 100, 6000  # of MLflow's log_batch


class _Metrics(NamedTuple):
    step: int
    time_ms: int
    values: dict[str, float]


class _Task(NamedTuple):
    send: Callable[[], None]
    table: str = ""  # that it writes


class MlflowTracker:
    """One MLflow run. All methods but `close` return at once.

    Args:
        uri: tracking URI; empty means the file mlflow.db in `folder`.
        folder: the run's output_dir; remembers the MLflow run's id.
        experiment, run_name: as shown by MLflow.
        resume: continue the MLflow run that `folder` remembers, where there is one.
        tags: of the run, e.g. mlflow.source.git.commit.
        system_every_s: seconds between two samples of MLflow's system metrics.
    """

    def __init__(
        self,
        uri: str,
        *,
        folder: Path,
        experiment: str,
        run_name: str,
        resume: bool,
        tags: dict[str, str],
        system_every_s: float = 10.0,
    ):
        self._is_own = not uri
        self._takes_artifacts = False
        self.uri = uri or f"sqlite:///{folder.resolve() / 'mlflow.db'}"
        is_file = self.uri.startswith(_SQLITE) and "?" not in self.uri
        file = self.uri.removeprefix(_SQLITE) if is_file else ""
        self._file = Path(file) if file else None  # of a store that is one
        self._folder, self._experiment, self._run_name = folder, experiment, run_name
        self._resume, self._tags, self._system_every_s = resume, tags, system_every_s
        self._client: Any = None
        self._monitor: Any = None
        self.run_id = ""
        self._items: deque = deque()
        self._dropped, self._failing, self._sent_at = 0, False, 0.0
        self._status: Status = "failed"  # until `close` says how it ended
        self._wake, self._closing = threading.Condition(), threading.Event()
        # Here, not in the thread: two threads that import large packages can meet each other's
        # half-imported modules. Costs 1.5 s, on rank 0 only.
        _import_mlflow()
        self._thread = threading.Thread(target=self._run, daemon=True, name="spmdrl-mlflow")
        self._thread.start()
        # The program left without closing: it crashed.
        atexit.register(self.close, "failed", timeout_s=10.0)

    # ---------------------------------------------------------------- for the loop

    def params(self, values: dict[str, Any], *, step: int) -> None:
        """Log parameters. One that the run already has with another value becomes a tag."""
        texts = {_clean(k): str(v)[:_MAX_PARAM_CHARS] for k, v in values.items()}
        self._put(_Task(partial(self._send_params, texts, step)))

    def metrics(self, step: int, values: dict[str, float]) -> None:
        """Log one step's metrics, stamped with the present time."""
        self._put(_Metrics(step, int(time.time() * 1000), values))

    def table(self, name: str, rows: list[dict[str, Any]]) -> None:
        """Show rows as the table artifact `name` (*.json), in place of what it held."""
        columns = list(dict.fromkeys(key for row in rows for key in row))
        data = [[row.get(key) for key in columns] for row in rows]
        text = json.dumps({"columns": columns, "data": data}, default=str)
        with self._wake:  # one that still waits is out of date
            for old in [i for i in self._items if isinstance(i, _Task) and i.table == name]:
                self._items.remove(old)
        self._put(_Task(partial(self._send_table, name, text), name))

    def artifact(self, path: Path) -> None:
        """Keep a copy of a file with the run."""
        self._put(_Task(lambda: self._send_artifact(path)))

    def close(self, status: Status, *, timeout_s: float = 30.0) -> None:
        """Send what waits, end the MLflow run with `status`; give up after `timeout_s`."""
        if self._closing.is_set():
            return
        atexit.unregister(self.close)
        self._status = status
        with self._wake:
            self._closing.set()
            self._wake.notify()
        self._thread.join(timeout_s)
        if lost := len(self._items) + self._dropped:
            what = f"the last {lost} items" if lost > 1 else "the last item"
            log.error("MLflow at %s did not take %s; metrics.jsonl has them", self.uri, what)
        elif self._thread.is_alive() or self._failing:
            log.error("MLflow at %s has all metrics, but not how the run ended", self.uri)

    def _put(self, item: Any) -> None:
        with self._wake:
            self._items.append(item)
            if len(self._items) > _MAX_WAITING:
                self._items.popleft()
                self._dropped += 1
            self._wake.notify()

    # ---------------------------------------------------------------- in the thread

    def _run(self) -> None:
        while True:
            with self._wake:
                while not self._is_due():
                    self._wake.wait(1.0)
                items = list(self._items)
            is_last = self._closing.is_set()
            # Whatever a tracker's client raises (its own, the database's, the network's error
            # types) must not reach training.
            _, error = attempt(lambda: self._send(items, is_last=is_last), Exception)
            self._note(error)
            if is_last:
                return

    def _is_due(self) -> bool:
        pause = _RETRY_S if self._failing else _GATHER_S
        rested = time.monotonic() - self._sent_at >= pause
        return self._closing.is_set() or (rested and (bool(self._items) or self._client is None))

    def _note(self, error: BaseException | None) -> None:
        if error and not self._failing:
            first_line = (str(error).splitlines() or [""])[0][:300]
            log.error(
                "MLflow at %s fails (%s: %s). Training goes on; metrics.jsonl has "
                "everything, and MLflow gets it when it answers again",
                self.uri,
                type(error).__name__,
                first_line,
            )
        if self._failing and not error:
            log.info("MLflow at %s answers again", self.uri)
        self._failing, self._sent_at = error is not None, time.monotonic()

    def _took(self, items: list[Any]) -> None:
        taken = {id(item) for item in items}
        with self._wake:
            self._items = deque(item for item in self._items if id(item) not in taken)

    def _send(self, items: list[Any], *, is_last: bool) -> None:
        from mlflow.entities import Metric

        if self._client is None:
            self._connect()
        steps = [item for item in items if isinstance(item, _Metrics)]
        points = [
            Metric(_clean(name), value, item.time_ms, item.step)
            for item in steps
            for name, value in item.values.items()
        ]
        for start in range(0, len(points), _MAX_METRICS):
            self._client.log_batch(self.run_id, metrics=points[start : start + _MAX_METRICS])
        self._took(steps)
        for item in items:
            if isinstance(item, _Task):
                item.send()
                self._took([item])
        if is_last:
            self._monitor.finish()
            self._client.set_terminated(self.run_id, _MLFLOW_STATUS[self._status])

    def _send_params(self, values: dict[str, str], step: int) -> None:
        from mlflow.entities import Param

        known = self._client.get_run(self.run_id).data.params
        new = [Param(k, v) for k, v in values.items() if k not in known]
        for start in range(0, len(new), _MAX_PARAMS):
            self._client.log_batch(self.run_id, params=new[start : start + _MAX_PARAMS])
        for key, value in values.items():
            if known.get(key, value) != value:  # parameters of a run cannot change in MLflow
                self._client.set_tag(self.run_id, f"from_step_{step}.{key}", value)

    def _send_artifact(self, path: Path) -> None:
        if self._takes_artifacts:
            self._client.log_artifact(self.run_id, str(path))

    def _send_table(self, name: str, text: str) -> None:
        if not self._takes_artifacts:
            return
        self._client.log_text(self.run_id, text, name)
        entries = [{"path": name, "type": "table"}]
        self._client.set_tag(self.run_id, _TABLE_TAG, json.dumps(entries))

    def _connect(self) -> None:
        from mlflow.system_metrics.system_metrics_monitor import SystemMetricsMonitor
        from mlflow.tracking import MlflowClient

        if self._file is not None:
            _create_store(self._file)
        client = MlflowClient(self.uri)
        self.run_id = self.run_id or self._known_run(client) or self._new_run(client)
        client.update_run(self.run_id, status="RUNNING")
        file = {"uri": self.uri, "experiment": self._experiment, "run_id": self.run_id}
        write_file(self._folder / _RUN_FILE, json.dumps(file) + "\n")
        self._monitor = SystemMetricsMonitor(
            self.run_id,
            sampling_interval=self._system_every_s,
            resume_logging=True,
            tracking_uri=self.uri,
        )
        self._monitor.start()
        self._takes_artifacts = not (self._is_own and self._leads_away(client))
        self._client = client

    def _leads_away(self, client: Any) -> bool:
        """Return whether the store in the run's folder would have files written elsewhere: it was
        moved, or is somebody else's."""
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

    def _known_run(self, client: Any) -> str | None:
        from mlflow.exceptions import MlflowException

        path = self._folder / _RUN_FILE
        file = json.loads(path.read_text()) if path.exists() else {}
        if not self._resume or file.get("uri") != self.uri:
            return None
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
            return None
        return file["run_id"]

    def _new_run(self, client: Any) -> str:
        found = client.get_experiment_by_name(self._experiment)
        number = self._new_experiment(client) if found is None else found.experiment_id
        return client.create_run(number, run_name=self._run_name, tags=self._tags).info.run_id

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
    """Make a store that is one file, unless it is there."""
    from mlflow.tracking import MlflowClient

    if path.exists():
        return
    # Under another name until it is whole: a process that ends while MLflow makes its tables would
    # leave a file that MLflow refuses ever after, and other runs may make the same store now.
    path.parent.mkdir(parents=True, exist_ok=True)
    host = socket.gethostname()
    for left in path.parent.glob(f"{path.name}.partial-{host}-*"):
        if not os.path.exists(f"/proc/{left.name.rpartition('-')[2]}"):
            remove(left)  # else a store that was killed here would have two names
    partial = path.with_name(f"{path.name}.partial-{host}-{os.getpid()}")
    remove(partial)
    MlflowClient(f"{_SQLITE}{partial.resolve()}")
    try:
        os.link(partial, path)
    except FileExistsError:  # another run's, made meanwhile
        pass
    except OSError:  # a file system without links
        rename(partial, path)
    remove(partial)


def tracking_uri(folder: Path | None) -> str:
    """Return the tracking URI of the MLflow run that an output_dir remembers; empty for none."""
    return str(_remembered(folder).get("uri", ""))


def _remembered(folder: Path | None) -> dict[str, Any]:
    path = None if folder is None else folder / _RUN_FILE
    found, _ = parsed_json(path.read_text()) if path and path.is_file() else (None, "")
    return found if isinstance(found, dict) else {}


def log_files(folder: Path | None, files: list[Path]) -> str:
    """Add files to the MLflow run that an output_dir remembers, wherever that is: of a folder that
    may be a stranger's, ask for its `tracking_uri` first.

    Returns: the tracking URI; empty where there is no such run.
    Raises: whatever MLflow's client raises when it cannot take them.
    """
    remembered = _remembered(folder)
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
    # MLflow reports usage to its makers unless told otherwise before its first import. Training
    # clusters often have no way out, and a run is its owner's business.
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
