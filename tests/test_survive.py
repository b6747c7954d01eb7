"""Runs that go on without an engine whose process is gone: nothing is lost, nothing drawn twice.

By default an engine dies in generation, and one that `launch` started; `pytest -m kill
tests/test_survive.py` has more, and ten moments by chance (KILL_SEED=1 draws others).
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import torch
from built import changed, good, made
from dying_rank import Moment
from kill_table import SEED, SURVIVING, Case, Stage, draw_cases, draw_moment
from runs import ROOT, TINY, arguments
from test_kill import ALL, Ranks, Runs, diary_of, places_of, rows_of, runs  # noqa: F401
from test_train import final_weights

from spmdrl.check.settings import validate
from spmdrl.errors import Refusal
from spmdrl.world.check_launch import check_launch
from spmdrl.world.launch import SPARES, read_launch

_GOES_ON_S = 5.0
"""Seconds from a death until the first rank goes on, on a machine that is not busy."""
_BUSY = 6.0
STAGES: tuple[Stage, ...] = ("generation", "exchange", "push", "save", "evaluation", "teardown")
FEW = [("survives, lag 1, three engines", "generation")]


def run_without(kind: str, folder: Path, shared: Path, moment: Moment) -> Ranks:
    """Run until all ranks have ended: well, but for those of the engine that dies."""
    ranks, flags = Ranks(kind, folder, shared, moment), SURVIVING[kind].flags
    size, trainers = flags.get("layout.inference-tp", 1), flags["layout.trainer-ranks"]
    engine = (moment.rank - trainers) // size
    every = range(SURVIVING[kind].ranks)
    left = [rank for rank in every if rank < trainers or (rank - trainers) // size != engine]
    deadline = time.monotonic() + 500
    try:
        while not ranks.are_over(left):
            assert time.monotonic() < deadline, ranks.everything()
            assert not any(ranks.exits[rank] for rank in left), ranks.everything()
            time.sleep(0.05)
        assert [ranks.exits[rank] for rank in left] == [0] * len(left), ranks.everything()
        assert (ranks.diary / "deed.json").exists(), f"nobody died\n{ranks.everything()}"
        return ranks
    finally:
        ranks.kill()


def check_same_end(kind: str, moment: Moment, runs: Runs, folder: Path) -> None:
    """A run that loses an engine ends with the weights and metrics of one that does not."""
    whole = runs.whole(kind) / "out"
    print(f"seed {SEED}, {kind}: {moment}")
    killed = run_without(kind, folder, runs.folder, moment)
    deed = json.loads((killed.diary / "deed.json").read_text())
    lines = diary_of(killed.diary, 0)
    on = [line["at"] for line in lines if line.get("leave") == "go on without an engine"]
    took = [at - deed["at"] for at in on]
    print("went on after", took, "s")
    assert took or moment.phase == "leave"  # at the very end nobody is waited for
    assert all(seconds < _GOES_ON_S * _BUSY for seconds in took)
    assert not on or f"rank {moment.rank} is missing" in killed.printed(0)
    assert_equal(whole, folder / "out")
    (rows, evaluated), (again, evaluated_again) = rows_of(whole), rows_of(folder / "out")
    assert [row["step"] for row in rows] == [row["step"] for row in again]
    assert [row["policy/loss"] for row in rows] == [row["policy/loss"] for row in again]
    assert [row["reward/mean"] for row in rows] == [row["reward/mean"] for row in again]
    assert [row["policy/grad_norm"] > 0 for row in rows] == [True] * len(rows)
    assert evaluated == evaluated_again


def assert_equal(whole: Path, other: Path) -> None:
    """Two runs ended with the same weights and optimizer."""
    first, second = final_weights(whole), final_weights(other)
    assert first.pop("newest") == second.pop("newest")
    assert first.keys() == second.keys()
    for name, value in first.items():
        assert torch.equal(value, second[name]), name


def engine_dies(kind: str, stage: Stage, whole: Path) -> Moment:
    """Return a moment in which an engine's rank dies in a stage."""
    case = Case(0, kind, stage, "kill", "an engine")
    # The first evaluation is start-up, in which a death ends the job.
    places = {
        rank: [place for place in entered if stage != "evaluation" or place["step"]]
        for rank, entered in places_of(whole, kind).items()
        if rank >= SURVIVING[kind].flags["layout.trainer-ranks"]
    }
    return draw_moment(case, places)


@pytest.mark.parametrize(
    ("kind", "stage"),
    [
        pytest.param(kind, stage, marks=[pytest.mark.kill] * ((kind, stage) not in FEW))
        for kind in SURVIVING
        for stage in STAGES
    ],
)
def test_a_run_that_loses_an_engine_ends_as_one_that_does_not(kind, stage, runs, tmp_path):
    moment = engine_dies(kind, stage, runs.whole(kind))
    check_same_end(kind, moment, runs, tmp_path)


@pytest.mark.kill
@pytest.mark.parametrize("case", draw_cases(list(SURVIVING), count=10), ids=str)
def test_an_engine_may_die_at_any_moment(case, runs, tmp_path):
    if case.stage not in STAGES:
        case = Case(case.number, case.kind, "generation", "kill", "an engine")
    check_same_end(
        case.kind, engine_dies(case.kind, case.stage, runs.whole(case.kind)), runs, tmp_path
    )


HELD = """
import time
from pathlib import Path

def varied(prompts, completions, **columns):
    while Path({gate!r}).exists():
        time.sleep(0.02)
    return [sum(map(ord, completion)) % 7 / 7 for completion in completions]
"""


def launched(folder: Path, shared: Path, engine: str, *options: str) -> subprocess.Popen:
    """Return a run of one trainer and two engines that `launch` starts; its rewards wait while
    there is a file `gate` in the folder."""
    folder.mkdir()
    (folder / "held.py").write_text(HELD.format(gate=str(folder / "gate")))
    flags = TINY["rl"] | ALL | {"steps": 8, "lag": 0, "engine.kind": engine}
    flags |= {"layout.trainer-ranks": 1, "layout.survive-engines": "true"}
    flags |= {"checkpoint.every-steps": 8, "algorithm.correction": "none"}
    flags |= {"model.path": shared / "dense", "rewards.timeout-s": 300.0}
    flags |= {"rewards.functions": f"{folder / 'held.py'}:varied", "output-dir": folder / "out"}
    program = arguments("demo_grpo.yaml", 3, **flags)
    command = [sys.executable, "-m", "spmdrl", "launch", "--survive-engines", "--nproc-per-node=3"]
    return subprocess.Popen(
        [*command, *options, *program], cwd=ROOT, stderr=subprocess.PIPE, text=True
    )


@pytest.mark.parametrize("engine", ["transformers", pytest.param("vllm", marks=pytest.mark.kill)])
def test_a_killed_engine_is_replaced_and_the_run_ends_the_same(engine, runs, tmp_path):
    whole, other = tmp_path / "whole", tmp_path / "other"
    with launched(whole, runs.folder, engine) as run:
        said = run.communicate(timeout=400)[1]
    assert run.returncode == 0, said
    with launched(other, runs.folder, engine, "--replace-engines=1") as run:
        try:
            until(lambda: len(rows_so_far(other / "out")) >= 3, run)
            (other / "gate").touch()
            process_of(run, rank=1).kill()
            until(lambda: "waits for the job to take it in" in logs(other / "out", rank=1), run)
            (other / "gate").unlink()
            said = run.communicate(timeout=300)[1]
        finally:
            run.terminate()
    assert run.returncode == 0, said
    assert "rank 1 was ended by SIGKILL" in said
    first = logs(other / "out", rank=0)
    assert first.count("an engine is gone") == 1 and "rank 1 joins as an engine" in first
    assert_equal(whole / "out", other / "out")


def until(condition: Callable[[], bool], run: subprocess.Popen) -> None:
    """Wait for something that a run does."""
    deadline = time.monotonic() + 300
    while not condition():
        assert run.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)


def logs(folder: Path, *, rank: int) -> str:
    """Return what a rank has logged, in all its processes."""
    return "".join(path.read_text() for path in folder.glob(f"logs/*/rank_{rank}*"))


def rows_so_far(folder: Path) -> list[str]:
    """Return the lines of a run's metrics."""
    path = folder / "metrics.jsonl"
    return path.read_text().splitlines() if path.exists() else []


def process_of(run: subprocess.Popen, *, rank: int) -> psutil.Process:
    """Return the process of a rank of a launcher."""
    children = psutil.Process(run.pid).children()
    return next(child for child in children if child.environ().get("RANK") == str(rank))


SURVIVES = dict(world_size=3, trainer_ranks=1, survive_engines=True)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        (dict(layout=SURVIVES | dict(placement="colocated")), "layout.placement colocated"),
        (dict(layout=SURVIVES | dict(world_size=2)), "with 1 engine; when it is lost nobody"),
        (dict(rollout=dict(schedule=dict(in_flight=True))), "rollout.schedule.in_flight: True"),
        (dict(rollout=dict(schedule=dict(dynamic=3.0))), "rollout.schedule.dynamic: 3.0"),
        (dict(rollout=dict(record=dict(every=1))), "rollout.record.every: 1"),
        (dict(model=dict(lora=dict(rank=8))), "model.lora.rank: 8"),
    ],
)
def test_what_was_not_tried_is_refused_by_name(changes, why):
    found = "\n".join(validate(changed(good(), **dict(layout=SURVIVES) | changes)))
    assert why in found
    assert "survive_engines" not in "\n".join(validate(changed(good(), layout=SURVIVES)))


def test_a_launcher_that_ends_all_ranks_is_refused():
    cfg = changed(made(), layout=SURVIVES)
    place = dict(RANK="0", WORLD_SIZE="3", MASTER_ADDR="127.0.0.1", MASTER_PORT="1")
    with pytest.raises(Refusal, match="torchrun ends all ranks when one ends"):
        check_launch(cfg, read_launch(place | {"TORCHELASTIC_RUN_ID": "x"}))
    check_launch(cfg, read_launch(place | {"TORCHELASTIC_RUN_ID": "x", SPARES: "1"}))
