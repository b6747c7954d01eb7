"""The folder of a run: nothing is written, renamed or removed through a link."""

from __future__ import annotations

import ast
import json
import os
import time
from pathlib import Path

import pytest

from spmdrl.check.dry_run import problems
from spmdrl.checkpoint import manifest as disk
from spmdrl.config import Config
from spmdrl.journal import Journal
from spmdrl.report.provenance import save_environment
from spmdrl.rollout.decision_log import journal_of
from spmdrl.run_folder import (
    FILES,
    FOLDERS,
    link_problems,
    make_folder,
    open_file,
    remove,
    rename,
    write_file,
)
from spmdrl.world.folder_lock import own_folder
from spmdrl.world.lost_peers.last_collectives import leave_record

ROOT = Path(__file__).parents[2]
PRECIOUS = "precious"


@pytest.fixture
def elsewhere(tmp_path) -> Path:
    """A folder of somebody's, in which nothing may change."""
    folder = tmp_path / "elsewhere"
    (folder / "inner").mkdir(parents=True)
    for path in (folder / "file", folder / "inner/file"):
        path.write_text(PRECIOUS)
    return folder


def content(folder: Path) -> dict[str, str]:
    found = sorted(folder.rglob("*"))
    return {str(p.relative_to(folder)): p.read_text() if p.is_file() else "" for p in found}


@pytest.fixture
def out(tmp_path) -> Path:
    folder = tmp_path / "out"
    folder.mkdir()
    return folder


BELOW = [
    *FILES,
    *FOLDERS,
    "logs/attempt_3",
    "logs/attempt_1/rank_0.log",
    "rollouts/step_000000_replica_0_of_1.parquet",
    "schedule/replica_0_of_1.jsonl",
    "evaluations/evaluation_4.json",
    "checkpoints/step_4",
    "checkpoints/step_4/policy",
    "checkpoints/step_4.partial",
    "checkpoints/step_4/manifest.json",
    "mlflow_artifacts/1/abc/artifacts",
]


@pytest.mark.parametrize("name", BELOW)
@pytest.mark.parametrize("kind", ["file", "folder", "nothing"])
def test_a_link_is_refused_by_name_before_a_run_and_by_the_dry_run(
    out, elsewhere, monkeypatch, name, kind
) -> None:
    monkeypatch.setenv("RANK", "0")
    before = content(elsewhere)
    target = {"file": elsewhere / "file", "folder": elsewhere, "nothing": elsewhere / "new"}[kind]
    path = out / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.symlink_to(target)
    said = next(problems(Config(output_dir=str(out))))
    assert str(path) in said
    if name != "run.lock":
        assert f"{path} is a link to {target}" in said and "another --output-dir" in said
    with pytest.raises(ValueError, match=str(path)), own_folder(out):
        pass
    assert content(elsewhere) == before


def test_what_has_a_second_name_is_refused_where_it_would_be_written_to(out, elsewhere) -> None:
    os.link(elsewhere / "file", out / "metrics.jsonl")
    (out / "checkpoints/step_4").mkdir(parents=True)
    os.link(elsewhere / "file", out / "checkpoints/step_4/rng_0.pt")  # as `cp -al` leaves it
    (problem,) = link_problems(out)
    assert f"{out / 'metrics.jsonl'} has another name too" in problem
    with pytest.raises(OSError, match="has another name too"):
        open_file(out / "metrics.jsonl", "ab")
    assert (elsewhere / "file").read_text() == PRECIOUS


def test_pipes_are_refused_without_waiting_for_a_reader(out) -> None:
    for name in ("config.yaml", "certificate.jsonl", "logs"):
        os.mkfifo(out / name)
    began = time.monotonic()
    said = link_problems(out)
    assert len(said) == 3 and "config.yaml is a pipe, no file" in said[0]
    for mode in ("w", "ab", "x"):
        with pytest.raises(OSError):
            open_file(out / "config.yaml", mode)
    assert time.monotonic() - began < 5


def test_the_folder_that_a_person_names_may_be_a_link_and_what_is_not_ours_too(
    out, elsewhere, tmp_path
) -> None:
    typed = tmp_path / "runs"
    typed.symlink_to(out)
    (out / "notes").symlink_to(elsewhere)
    (out / "checkpoints/step_2").mkdir(parents=True)
    (out / "checkpoints/best").symlink_to("step_2")
    (out / "checkpoints/mine").symlink_to(elsewhere)
    assert link_problems(typed) == []
    make_folder(typed / "logs/attempt_1", within=typed)
    write_file(typed / "logs/attempt_1/rank_0.log", "x\n", within=typed)
    write_file(typed / "metrics.jsonl", "y\n")
    assert (out / "logs/attempt_1/rank_0.log").read_text() == "x\n"
    assert (out / "metrics.jsonl").read_text() == "y\n" and typed.is_symlink()
    assert [path.name for path in out.glob(".*")] == []


def test_writers_follow_no_link_that_came_after_the_start(out, elsewhere) -> None:
    before = content(elsewhere)
    (out / "config.yaml").symlink_to(elsewhere / "file")
    (out / "logs").symlink_to(elsewhere)
    (out / "schedule").symlink_to(elsewhere)
    (out / "flight").symlink_to(elsewhere)
    (out / "metrics.jsonl").symlink_to(elsewhere / "file")
    with pytest.raises(OSError, match=r"logs is a link to .*, no folder"):
        save_environment(Config(), folder=out, attempt_folder=out / "logs")
    with pytest.raises(OSError, match=r"schedule is a link"):
        journal_of(out / "schedule", replica=0, replicas=1).append({})
    assert "flight is a link" in leave_record(out / "flight", rank=0)
    file = Journal(out / "metrics.jsonl")
    file.append({"step": 1})  # kept in memory
    assert content(elsewhere) == before
    (out / "metrics.jsonl").unlink()
    file.append({"step": 2})
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert rows == [{"step": 1}, {"step": 2}]
    (out / "logs").unlink()
    (out / "logs").mkdir()
    with pytest.raises(OSError, match=r"config.yaml is a link"):
        save_environment(Config(), folder=out, attempt_folder=out / "logs")
    assert content(elsewhere) == before


def test_links_are_removed_and_renamed_and_what_they_name_stays(out, elsewhere) -> None:
    before, root = content(elsewhere), out / "checkpoints"
    (root / "step_1/policy").mkdir(parents=True)
    (root / "step_1/policy/inner").symlink_to(elsewhere)  # within a folder that goes
    (root / "step_2").symlink_to(elsewhere)
    disk.remove(root / "step_1")
    disk.rename(root / "step_2", root / "step_3")
    assert os.readlink(root / "step_3") == str(elsewhere)
    disk.remove(root / "step_3")
    assert list(root.iterdir()) == []
    (out / "rollouts").symlink_to(elsewhere)
    for act in (
        lambda: remove(out / "rollouts/inner", within=out),
        lambda: rename(out / "rollouts/file", out / "taken", within=out),
        lambda: rename(root, out / "rollouts/moved", within=out),
        lambda: write_file(out / "rollouts/new", "x", within=out),
        lambda: make_folder(out / "rollouts/new", within=out),
        lambda: write_file(out / "logs/../../elsewhere/file", "x", within=out),
    ):
        (out / "logs").mkdir(exist_ok=True)
        with pytest.raises(OSError, match=r"is a link|leads out"):
            act()
    assert content(elsewhere) == before


# --------------------------------------------------------------------------- one home

_CALLS = {"write_text", "write_bytes", "rmtree", "touch", "save_file"}
_OF_OS = {"rename", "replace", "unlink", "remove", "truncate", "rmdir", "makedirs"}
_ALLOWED = {
    "spmdrl/run_folder.py": "the home of these",
    "spmdrl/world/launch.py": "the launcher's files, and those in a folder of the user's own",
    "spmdrl/world/secret.py": "a file of the folder that only the user may enter",
    "spmdrl/sandbox/launcher.py": "the root that it makes for a program",
    "spmdrl/tools/export/hf_folder.py": "weights of an export, in a folder that it has just made",
    "spmdrl/model/lora/files.py": "weights of an adapter, in a folder that was just made",
    "spmdrl/tools/small_models/random_vision.py": "a new model, where the user says",
    "spmdrl/check/proved_models.py": "what was proved, in the user's own folder of caches",
    "spmdrl/tools/proof/table.py": "a page of docs",
    "spmdrl/tools/commands/plan_examples.py": "a page of docs",
    "spmdrl/tools/commands/export.py": "the empty folder that the user names",
    "spmdrl/sandbox/supervisor.py": "a pipe",
    "spmdrl/agents/solve.py": "the row for an agent's command, in a temporary folder",
    "spmdrl/workers/subreaper.py": "a file of /proc",
    "spmdrl/engine/vllm/internals.py": "the job's own shared memory",
}


def _writes(node: ast.AST) -> bool:
    if not isinstance(node, ast.Call) or not isinstance(node.func, (ast.Attribute, ast.Name)):
        return False
    name = node.func.attr if isinstance(node.func, ast.Attribute) else node.func.id
    on = node.func.value if isinstance(node.func, ast.Attribute) else None
    is_of_os = isinstance(on, ast.Name) and on.id == "os"
    if name == "open" and not is_of_os:
        words = [a.value for a in node.args if isinstance(a, ast.Constant)]
        return any(isinstance(w, str) and w[:1] in ("w", "a", "x") and len(w) < 4 for w in words)
    is_ours = isinstance(on, ast.Name) and on.id in ("disk", "run_folder")
    is_path = name in ("unlink", "rename", "rmdir") and on is not None and not is_ours
    return name in _CALLS or (is_of_os and name in _OF_OS) or is_path


def test_files_are_written_renamed_and_removed_in_few_places() -> None:
    found: dict[str, list[int]] = {}
    for path in [*sorted((ROOT / "spmdrl").rglob("*.py")), ROOT / "train.py"]:
        for node in filter(_writes, ast.walk(ast.parse(path.read_text()))):
            found.setdefault(path.relative_to(ROOT).as_posix(), []).append(node.lineno)
    new = {file: lines for file, lines in found.items() if file not in _ALLOWED}
    assert not new, f"ask spmdrl/run_folder.py: {new}"
    left = _ALLOWED.keys() - found.keys()
    assert not left, f"take off the list: {left}"
