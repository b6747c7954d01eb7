"""Trackers: the thread that calls one, a real MLflow on SQLite, and one that is not there."""

from __future__ import annotations

import dataclasses
import json
import logging
import sqlite3
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from spmdrl.config import MlflowSettings, flatten
from spmdrl.journal import read_rows
from spmdrl.report import tracker
from spmdrl.report.tracker import MetricsRow, Status, Trackers, TrackerThread
from spmdrl.report.trackers.mlflow_tracker import MlflowTracker
from tests.helpers.ranks import free_port
from tests.helpers.report_world import FreeWatch, config, record_steps, reporting


def open_tracker(
    folder: Path, uri: str = "", *, resume: bool = False, **changed: Any
) -> TrackerThread:
    options = dict(experiment="tests", run_name="one") | changed
    thread = TrackerThread(MlflowTracker(uri, folder=folder, **options))
    thread.start({}, {}, step=int(resume))
    return thread


def close(thread: TrackerThread, status: Status, *, timeout_s: float = 30.0) -> None:
    thread.end(status)
    thread.join(timeout_s)


class FakeTracker:
    """Keeps what it is given; fails or blocks where a test says so."""

    name = "the fake"
    view_command = "fake show"

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.failures = 0  # that are still to come
        self.gate = threading.Event()
        self.gate.set()

    def _call(self, *call: Any) -> None:
        self.gate.wait()
        if self.failures:
            self.failures -= 1
            raise ConnectionError("down\nfor a while")
        self.calls.append(call)

    def start(self, params: Any, tags: Any, *, step: int) -> None:
        self._call("start", params, tags, step)

    def metrics(self, rows: Sequence[MetricsRow]) -> None:
        self._call("metrics", [row.step for row in rows])

    def table(self, name: str, rows: Any) -> None:
        self._call("table", name, rows)

    def artifact(self, path: Path) -> None:
        self._call("artifact", path)

    def close(self, status: str) -> None:
        self._call("close", status)


def test_a_tracker_is_called_in_order_and_gets_all_that_it_missed(monkeypatch, caplog):
    monkeypatch.setattr(tracker, "_RETRY_S", 0.01)
    monkeypatch.setattr(tracker, "_GATHER_S", 0.0)
    fake = FakeTracker()
    fake.failures = 3
    thread = TrackerThread(fake)
    thread.start({"lr": 1}, {"source.name": "train.py"}, step=2)
    for step in range(2, 50):
        thread.metrics(step, {"loss": 0.5})
    wait_for(lambda: not fake.failures and not thread._num_waiting())
    thread.table("samples.json", [{"a": 1}])
    thread.artifact(Path("curves.png"))
    close(thread, "finished")
    assert fake.calls[0] == ("start", {"lr": 1}, {"source.name": "train.py"}, 2)
    assert [call[0] for call in fake.calls].count("start") == 1
    steps = [step for call in fake.calls if call[0] == "metrics" for step in call[1]]
    assert steps == [*range(2, 50)]
    assert ("table", "samples.json", [{"a": 1}]) in fake.calls
    assert ("artifact", Path("curves.png")) in fake.calls
    assert fake.calls[-1] == ("close", "finished")
    assert caplog.text.count("the fake fails (ConnectionError: down). Training goes on") == 1
    assert "did not take" not in caplog.text


def test_a_tracker_that_hangs_delays_neither_a_step_nor_the_end(monkeypatch, caplog):
    monkeypatch.setattr(tracker, "_MAX_ROWS", 10)
    fake = FakeTracker()
    fake.gate.clear()
    thread = TrackerThread(fake)
    thread.start({}, {}, step=0)
    began = time.monotonic()
    for step in range(30):
        thread.metrics(step, {"loss": 0.5})
    thread.table("samples.json", [])
    thread.table("samples.json", [{"a": 1}])  # in place of the first
    close(thread, "finished", timeout_s=0.2)
    assert time.monotonic() - began < 5
    assert "the fake did not take the last 31 items" in caplog.text
    assert not fake.calls
    fake.gate.set()  # let the thread end
    thread._thread.join(60)
    assert fake.calls[1] == ("metrics", [*range(20, 30)])


def test_a_tracker_that_hangs_or_fails_stops_no_other(monkeypatch, caplog):
    monkeypatch.setattr(tracker, "_GATHER_S", 0.0)
    hanging = FakeTracker()
    hanging.gate.clear()
    failing = FakeTracker()
    failing.failures = 10**9
    well = FakeTracker()
    trackers = Trackers([hanging, failing, well])
    threads = trackers._threads
    trackers.start({}, {}, step=0)
    for step in range(5):
        trackers.metrics(step, {"loss": 0.5})
    wait_for(lambda: ("metrics", [4]) in well.calls or len(well.calls) > 1)
    trackers.table("samples.json", [{"a": 1}])
    began = time.monotonic()
    trackers.close("finished", timeout_s=1.0)
    trackers.close("failed")  # of another thread, too late
    assert time.monotonic() - began < 5  # one time for all
    assert well.calls[-2:] == [("table", "samples.json", [{"a": 1}]), ("close", "finished")]
    assert caplog.text.count("did not take the last 6 items") == 2
    hanging.gate.set()
    threads[0]._thread.join(60)
    assert hanging.calls[-1] == ("close", "finished")


def client_of(folder: Path) -> Any:
    from mlflow.tracking import MlflowClient

    return MlflowClient(f"sqlite:///{folder.resolve() / 'mlflow.db'}")


def run_id_of(folder: Path) -> str:
    return json.loads((folder / "mlflow_run.json").read_text())["run_id"]


def test_runs_that_start_at_once_share_one_store_of_one_line(tmp_path):
    store = tmp_path / "all" / "mlflow.db"
    program = (
        "import sys\n"
        "from pathlib import Path\n"
        "from spmdrl.report.trackers.mlflow_tracker import MlflowTracker\n"
        "from spmdrl.report.tracker import Trackers\n"
        "uri, folder = sys.argv[1:]\n"
        "Path(folder).mkdir()\n"
        "run = Trackers([MlflowTracker(uri, folder=Path(folder), experiment='shared',\n"
        "                              run_name=Path(folder).name)])\n"
        "run.start({}, {}, step=0)\n"
        "run.metrics(0, {'reward/mean': 0.5})\n"
        "run.table('samples.json', [{'a': 1}])\n"
        "run.close('finished', timeout_s=200)\n"
    )
    names = ("first", "second")
    runs = [
        subprocess.Popen(
            [sys.executable, "-c", program, f"sqlite:///{store}", str(tmp_path / name)],
            cwd=Path(__file__).parents[2],
        )
        for name in names
    ]
    assert [run.wait(timeout=250) for run in runs] == [0, 0]
    from mlflow.tracking import MlflowClient

    client = MlflowClient(f"sqlite:///{store}")
    (shared,) = (e for e in client.search_experiments() if e.name == "shared")
    found = client.search_runs([shared.experiment_id])
    assert sorted(run.info.run_name for run in found) == ["first", "second"]
    assert [run.data.metrics["reward/mean"] for run in found] == [0.5, 0.5]
    assert len(list((tmp_path / "all" / "mlflow_artifacts").rglob("samples.json"))) == 2
    assert [path.name for path in (tmp_path / "all").glob("mlflow.db*")] == ["mlflow.db"]


def test_a_run_can_be_read_back_from_mlflow_and_is_continued_on_resume(tmp_path):
    folder = tmp_path / "my_run"
    cfg = config(
        folder,
        steps=8,
        trackers=("mlflow",),
        mlflow=MlflowSettings(experiment="tests"),
        aliases="verl",
    )
    with reporting(cfg, ending="stopped") as report:
        record_steps(report, 0, 6)
    first, client = run_id_of(folder), client_of(folder)
    assert client.get_run(first).info.status == "KILLED"
    with reporting(dataclasses.replace(cfg, steps=9), step=4) as report:
        record_steps(report, 4, 9, reward=0.75)
        report.evaluation(9, {"eval/reward": (3, 4)})
    assert run_id_of(folder) == first
    run = client.get_run(first)
    assert run.info.status == "FINISHED" and run.info.run_name == "my_run"
    for name, value in flatten(cfg).items():
        assert run.data.params[name] == str(value)
    assert run.data.params["derived.sequences per step"] == "64 prompts * 8 = 512"
    assert run.data.tags["from_step_4.steps"] == "9"
    points = {m.step: m.value for m in client.get_metric_history(first, "reward/mean")}
    assert points == {0: 0.5, 1: 0.5, 2: 0.5, 3: 0.5} | dict.fromkeys(range(4, 9), 0.75)
    assert run.data.metrics["critic/score/mean"] == 0.75
    assert run.data.metrics["eval/reward"] == 0.75
    check_artifacts(client, first, folder=folder)


def check_artifacts(client: Any, run_id: str, *, folder: Path) -> None:
    names = {item.path for item in client.list_artifacts(run_id)}
    assert {"samples.json", "curves.png", "config.yaml"} <= names
    tag = json.loads(client.get_run(run_id).data.tags["mlflow.loggedArtifacts"])
    assert tag == [{"path": "samples.json", "type": "table"}]
    table = json.loads(Path(client.download_artifacts(run_id, "samples.json")).read_text())
    assert table["columns"] == ["step", "prompt", "response", "reward"]
    assert [row[0] for row in table["data"]] == [0, 5]
    assert table["data"][0][1:] == ["1+2=", "3", 1.0]
    assert len(read_rows(folder / "metrics.jsonl")) == 10


def test_a_run_that_ends_early_is_not_left_running(tmp_path):
    cfg = config(tmp_path, trackers=("mlflow",), mlflow=MlflowSettings(experiment="tests"))
    watch = FreeWatch()
    with reporting(cfg, ending="failed", watch=watch) as report:
        record_steps(report, 0, 1)
        for close in watch.before_exit:  # what a rank does before os._exit
            close("failed")
        assert client_of(tmp_path).get_run(run_id_of(tmp_path)).info.status == "FAILED"


def test_a_fresh_start_in_the_same_folder_is_a_new_mlflow_run(tmp_path):
    ids = []
    for resume in (False, True, False):
        run = open_tracker(tmp_path, resume=resume)
        run.metrics(0, {"reward/mean": 1.0})
        close(run, "finished")
        ids.append(run_id_of(tmp_path))
    assert ids[0] == ids[1] != ids[2]


def test_a_store_in_the_folder_that_leads_out_of_it_gets_no_files(tmp_path, caplog):
    folder, away = tmp_path / "run", tmp_path / "away"
    first = open_tracker(folder)
    close(first, "finished")
    with sqlite3.connect(folder / "mlflow.db") as store:  # as a stranger may have made it
        store.execute("UPDATE runs SET artifact_uri = ?", (away.as_uri(),))
    second = open_tracker(folder, resume=True)
    (folder / "curves.png").write_bytes(b"")
    second.artifact(folder / "curves.png")
    second.table("samples.json", [{"a": 1}])
    second.metrics(1, {"reward": 0.5})
    close(second, "finished")
    assert second.tracker.run_id == first.tracker.run_id and not away.exists()
    assert client_of(folder).get_run(first.tracker.run_id).data.metrics["reward"] == 0.5
    assert f"keeps its files in {away.as_uri()}, which is not below it" in caplog.text


def test_system_metrics_are_recorded(tmp_path):
    run = open_tracker(tmp_path, system_every_s=0.2)
    client, deadline, found = None, time.monotonic() + 60, []
    while not found and time.monotonic() < deadline:
        time.sleep(0.5)
        if (tmp_path / "mlflow_run.json").exists():
            client = client or client_of(tmp_path)
            metrics = client.get_run(run_id_of(tmp_path)).data.metrics
            found = [name for name in metrics if name.startswith("system/")]
    close(run, "finished")
    assert "system/cpu_utilization_percentage" in found


def test_a_deleted_mlflow_run_is_replaced_and_said(tmp_path, caplog):
    run = open_tracker(tmp_path)
    close(run, "finished")
    old = run_id_of(tmp_path)
    client_of(tmp_path).delete_run(old)
    run = open_tracker(tmp_path, resume=True)
    run.metrics(3, {"reward/mean": 1.0})
    close(run, "finished")
    assert run_id_of(tmp_path) != old and f"MLflow run {old} is gone" in caplog.text


def test_a_tracker_that_is_down_is_said_once_and_stops_nothing(tmp_path, capsys):
    uri = f"http://127.0.0.1:{free_port()}"
    cfg = config(tmp_path, trackers=("mlflow",), mlflow=MlflowSettings(uri=uri))
    with reporting(cfg) as report:
        record_steps(report, 0, 3)
        began = time.monotonic()
    assert time.monotonic() - began < 60
    out = capsys.readouterr().out
    assert out.count(f"MLflow at {uri} fails") == 1
    assert "Training goes on" in out and "did not take the last" in out
    assert len(read_rows(tmp_path / "metrics.jsonl")) == 3


def test_a_tracker_that_comes_back_gets_what_it_missed(tmp_path, monkeypatch, caplog):
    caplog.set_level(logging.INFO, "spmdrl")
    monkeypatch.setattr(tracker, "_RETRY_S", 0.2)
    blocker = tmp_path / "store"
    blocker.write_text("a file where the store's folder should be")
    run = open_tracker(tmp_path, f"sqlite:///{blocker}/mlflow.db")
    run.metrics(0, {"reward/mean": 0.5})
    wait_for(lambda: "fails" in caplog.text)
    run.metrics(1, {"reward/mean": 0.75})
    blocker.unlink()
    blocker.mkdir()
    wait_for(lambda: "answers again" in caplog.text)
    close(run, "finished")
    history = client_of(blocker).get_metric_history(run.tracker.run_id, "reward/mean")
    assert {m.step: m.value for m in history} == {0: 0.5, 1: 0.75}
    assert caplog.text.count("fails") == 1


def test_a_tracker_that_only_misses_the_end_is_not_said_to_miss_items(
    tmp_path, monkeypatch, caplog
):
    run = open_tracker(tmp_path)
    run.metrics(0, {"reward/mean": 0.5})
    wait_for(lambda: run._is_started and not run._num_waiting())

    def fail(*_: Any) -> None:
        raise ConnectionError("gone")

    monkeypatch.setattr(run.tracker._client, "set_terminated", fail)
    close(run, "finished")
    assert "has all metrics, but not how the run ended" in caplog.text
    assert "did not take" not in caplog.text


def wait_for(condition: Any, *, timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.1)


def test_mlflow_does_not_phone_home():
    # In a process that MLflow does not take for a test or a CI job, where it is quiet anyway.
    code = (
        "from spmdrl.report.trackers.mlflow_tracker import _import_mlflow; _import_mlflow();"
        "from mlflow.telemetry import get_telemetry_client;"
        "from mlflow.telemetry.utils import _IS_IN_CI_ENV_OR_TESTING, is_telemetry_disabled;"
        "assert not _IS_IN_CI_ENV_OR_TESTING;"
        "assert is_telemetry_disabled() and get_telemetry_client() is None"
    )
    env = {"PATH": "", "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr


def test_a_step_costs_the_loop_little(tmp_path):
    cfg = config(tmp_path, steps=60, trackers=("mlflow",))
    taken = []
    with reporting(cfg) as report:
        for step in range(60):
            began = time.perf_counter()
            record_steps(report, step, step + 1)
            taken.append(time.perf_counter() - began)
    assert statistics.median(taken) < 0.02, f"median {statistics.median(taken) * 1e3:.1f} ms"
