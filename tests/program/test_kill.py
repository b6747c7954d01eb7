"""Runs that lose a rank at any moment: the others end in time and say whom they miss, and the run,
started again, ends as one that was never killed.

By default two cases on a machine that may be busy; `pytest -m kill` draws fifty, an hour, and
holds the times that docs/runs.md gives; and sixteen of runs in which time decides. KILL_SEED=1
draws others.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
from filelock import FileLock

from spmdrl.tools.proof.ranks import launch_env, start_rank
from tests.helpers.built import small_model
from tests.helpers.ranks import free_port
from tests.helpers.runs import TINY, arguments
from tests.program.dying_rank import SHORT_S, Moment, be_rank
from tests.program.kill_table import (
    CASES,
    DEFAULT,
    KINDS,
    SEED,
    TIMED,
    Case,
    draw_cases,
    draw_moment,
    stage_of,
)
from tests.program.test_train import final_weights

STEPS = 4
REWARD = """
def varied(prompts, completions, **columns):
    return [sum(map(ord, completion)) % 7 / 7 for completion in completions]
"""
ALL = {
    "steps": STEPS,
    "checkpoint.every-steps": 2,
    "checkpoint.keep.last": 9,
    "checkpoint.write-timeout-s": 300,
    "layout.wait-timeout-s": 300,
    "layout.startup-timeout-s": 300,
    "batch.prompts-per-step": 8,
    "batch.tokens-per-microbatch": 512,
}
_RUN_S = 500.0  # for a whole run on a busy machine


@dataclass(frozen=True)
class Limits:
    """Seconds within which each rank that is left says whom it misses."""

    kill: float
    """Of a death."""
    cut: float
    """Of the connections' end."""
    stop: float
    """Of its own wait's deadline."""


WIDE, STRICT = Limits(60.0, 60.0, 60.0), Limits(3.0, 10.0, 10.0)


class Runs:
    """Runs of each kind, in a folder that all processes of these tests share."""

    def __init__(self, folder: Path):
        self.folder = folder
        with FileLock(folder / "lock"):
            self._make_models()

    def whole(self, kind: str) -> Path:
        """Return the folder of a run that nobody killed."""
        folder = self.folder / re.sub(r"\W+", "_", kind)
        with FileLock(f"{folder}.lock"):
            if not (folder / "is_whole").exists():
                run_to_its_end(Ranks(kind, folder, self.folder))
                (folder / "is_whole").touch()
        return folder

    def _make_models(self) -> None:
        for name, architecture in (("dense", "qwen3"), ("moe", "qwen3_moe")):
            if not (self.folder / name).exists():
                sizes = dict(hidden_size=64, heads=2, initializer_std=0.1, chat_template=True)
                small_model(self.folder / name, architecture=architecture, **sizes)
        (self.folder / "r.py").write_text(REWARD)


class Ranks:
    """The processes of one attempt of a run.

    Args:
        folder: of the run, its diaries beside its own files.
        shared: with models and rewards.
        again: folder of the run whose schedule it follows.
    """

    def __init__(
        self,
        kind: str,
        folder: Path,
        shared: Path,
        moment: Moment | None = None,
        *,
        again: Path | None = None,
    ):
        what, self.folder, self.out = KINDS[kind], folder, folder / "out"
        shutil.rmtree(folder / "diary", ignore_errors=True)
        self.diary = folder / "diary"
        self.diary.mkdir(parents=True)
        flags = TINY["rl" if what.samples else "sft"] | ALL
        flags |= {"model.path": shared / what.model, "output-dir": self.out}
        if what.samples:
            flags |= {"engine.kind": "transformers", "evaluate.every-steps": 2}
            flags |= {"data.eval-size": 8, "rewards.timeout-s": 300.0}
            flags |= {"rewards.functions": f"{shared / 'r.py'}:varied"}
        if again is not None:
            flags |= {"rollout.replay-schedule": again / "out"}
        argv = arguments(what.config, what.ranks, **flags | dict(what.flags))
        port = free_port()
        self._processes = [
            start_rank(
                os.environ | launch_env(rank, what.ranks, port), be_rank, argv, self.diary, moment
            )
            for rank in range(what.ranks)
        ]

    def are_over(self, ranks: list[int]) -> bool:
        """Return whether these processes have ended."""
        return all(self._processes[rank].exitcode is not None for rank in ranks)

    @property
    def exits(self) -> list[int | None]:
        """Exit status of each rank; None for one that runs."""
        return [process.exitcode for process in self._processes]

    def printed(self, rank: int) -> str:
        """Return what a rank has printed so far."""
        path = self.diary / f"printed_{rank}.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def everything(self) -> str:
        """Return the end of what each rank has printed."""
        texts = (self.printed(rank)[-5000:] for rank in range(len(self._processes)))
        return "\n".join(f"--- rank {rank}\n{text}" for rank, text in enumerate(texts))

    def kill(self) -> None:
        """End what is left, stopped processes too, and what they started."""
        for process in self._processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                for child in psutil.Process(process.pid).children(recursive=True):
                    with contextlib.suppress(psutil.NoSuchProcess):
                        child.kill()
            process.kill()
            process.join()


def run_to_its_end(ranks: Ranks) -> None:
    """Wait until all ranks have ended well."""
    deadline = time.monotonic() + _RUN_S
    try:
        while not ranks.are_over(list(range(len(ranks.exits)))):
            assert time.monotonic() < deadline, f"no end in {_RUN_S} s\n{ranks.everything()}"
            assert not any(ranks.exits), ranks.everything()
            time.sleep(0.05)
        assert not any(ranks.exits), ranks.everything()
    finally:
        ranks.kill()


def run_to_its_death(ranks: Ranks) -> tuple[dict[str, Any], dict[int, float]]:
    """Wait until all but the rank that dies have ended; return what it did, and of the others when
    each named it.
    """
    deadline, deed, named = time.monotonic() + _RUN_S, None, {}
    path = ranks.diary / "deed.json"
    try:
        while True:
            deed = deed or (json.loads(path.read_text()) if path.exists() else None)
            left = [r for r in range(len(ranks.exits)) if deed is None or r != deed["rank"]]
            over = ranks.are_over(left)  # before their words are read
            for rank in left if deed else ():
                if rank not in named and names(ranks.printed(rank), deed):
                    named[rank] = time.time()
            if over:
                break
            assert time.monotonic() < deadline, f"no end: {deed}\n{ranks.everything()}"
            time.sleep(0.02)
        assert deed, f"ended before the moment came\n{ranks.everything()}"
        statuses = [ranks.exits[rank] for rank in left]
        assert 0 not in statuses, f"ended as if nothing were: {statuses}\n{ranks.everything()}"
        unsaid = [rank for rank in left if rank not in named]
        assert not unsaid, f"{unsaid} did not name {deed}\n{ranks.everything()}"
        if deed["death"] != "stop":
            check_nothing_is_left(deed)
        return deed, named
    finally:
        ranks.kill()


def check_nothing_is_left(deed: dict[str, Any]) -> None:
    """What a dead rank had started (workers, their programs) ends by itself."""
    deadline = time.monotonic() + 60
    for pid, began in deed["children"]:
        with contextlib.suppress(psutil.NoSuchProcess):
            child = psutil.Process(pid)
            while child.create_time() == began and child.status() != psutil.STATUS_ZOMBIE:
                assert time.monotonic() < deadline, f"{child} outlives rank {deed['rank']}"
                time.sleep(0.05)


def names(text: str, deed: dict[str, Any]) -> bool:
    """Return whether a rank said who is missing: rank, host, phase and step."""
    places = "|".join(re.escape(f"'{phase}' at step {step}") for phase, step in deed["places"])
    host = re.escape(deed["host"])
    who = rf"rank {deed['rank']} is missing[^\n]*"
    said = rf"{who} on {host}[^\n]*({places})|{who}({places})[^\n]* on {host}"
    return re.search(said, text) is not None


def diary_of(folder: Path, rank: int) -> list[dict[str, Any]]:
    """Return the lines that a rank wrote down."""
    text = (folder / f"places_{rank}.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


def places_of(folder: Path, kind: str) -> dict[int, list[dict[str, Any]]]:
    """Return of each rank of a whole run the first entry of each place, with its seconds."""
    found: dict[int, list[dict[str, Any]]] = {}
    for rank in range(KINDS[kind].ranks):
        open_at: dict[tuple[str, int], float] = {}
        seconds: dict[tuple[str, int], float] = {}
        for line in diary_of(folder / "diary", rank):
            if "enter" in line:
                open_at.setdefault((line["enter"], line["step"]), line["at"])
            elif "leave" in line:
                place = line["leave"], line["step"]
                seconds.setdefault(place, line["at"] - open_at[place])
        found[rank] = [dict(phase=p, step=s, seconds=d) for (p, s), d in seconds.items()]
    return found


def check_times(
    deed: dict[str, Any], named: dict[int, float], killed: Ranks, limits: Limits
) -> str:
    """Each rank named the missing one in time; return how long each took."""
    took = {}
    for rank, at in named.items():
        lines, began = diary_of(killed.diary, rank), deed["at"]
        if deed["death"] == "stop":
            waits = [line["at"] for line in lines if line.get("waits")]
            began = max(deed["at"], max((t for t in waits if t < at), default=0.0) + SHORT_S)
        late_s = max((line["late_s"] for line in lines if "late_s" in line), default=0.0)
        took[rank] = at - began
        limit_s = getattr(limits, deed["death"]) + late_s
        assert took[rank] <= limit_s, f"{deed}: {took}\n{killed.everything()}"
    return ", ".join(f"rank {rank} {seconds:.1f} s" for rank, seconds in took.items())


_LEARNT = ("step", "reward/", "rollout/", "environment/", "policy/", "value/", "data/", "eval/")


def rows_of(folder: Path) -> tuple[list[dict[str, Any]], dict[int, dict[str, Any]]]:
    """Return the rows of the steps and {step: row} of the evaluations (one that a resume begins
    with is written again), without what a clock or the machine's memory says."""
    steps, evaluations = [], {}
    for line in (folder / "metrics.jsonl").read_text().splitlines():
        row = {k: v for k, v in json.loads(line).items() if k.startswith(_LEARNT)}
        row.pop("reward/seconds", None)
        if "policy/loss" in row:
            steps.append(row)
        else:
            evaluations[row["step"]] = row
    return steps, evaluations


def assert_same_end(whole: Path, resumed: Path) -> None:
    """The resumed run ended where the whole one did, bit for bit."""
    import torch

    first, second = final_weights(whole), final_weights(resumed)
    assert first.keys() == second.keys() and first.pop("newest") == second.pop("newest")
    (rows, evaluated), (again, evaluated_again) = rows_of(whole), rows_of(resumed)
    assert [row["step"] for row in rows] == [row["step"] for row in again]
    for name, value in first.items():
        assert torch.equal(value, second[name]), f"{name} differs"
    assert rows == again and evaluated == evaluated_again
    assert all(row["policy/grad_norm"] > 0 for row in rows)  # every step moved the weights


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "killed"
    folder.mkdir(exist_ok=True)
    return Runs(folder)


def check(case: Case, runs: Runs, folder: Path, limits: Limits) -> None:
    """Kill a run, start it again, and compare its end with that of one that was not killed."""
    whole = runs.whole(case.kind)
    moment = draw_moment(case, places_of(whole, case.kind))
    print(f"seed {SEED}, {case}: {moment}")
    again = whole if KINDS[case.kind].is_timed else None
    killed = Ranks(case.kind, folder, runs.folder, moment, again=again)
    deed, named = run_to_its_death(killed)
    print(f"in {deed['places'][-1]}; named after", check_times(deed, named, killed, limits))
    run_to_its_end(Ranks(case.kind, folder, runs.folder, again=again))
    assert_same_end(whole / "out", folder / "out")


_EIGHT = [
    pytest.param(case, marks=[pytest.mark.kill] * (number > 0), id=str(case))
    for number, case in enumerate(draw_cases(DEFAULT, count=8, seed="eight"))
]


@pytest.mark.parametrize("case", _EIGHT)
def test_a_run_that_loses_a_rank_says_so_and_ends_as_if_it_had_not(case, runs, tmp_path):
    check(case, runs, tmp_path, WIDE)


@pytest.mark.kill
@pytest.mark.parametrize("case", draw_cases(KINDS, count=CASES), ids=str)
def test_any_kind_of_run_may_lose_any_rank_at_any_moment(case, runs, tmp_path):
    check(case, runs, tmp_path, STRICT)


@pytest.mark.kill
@pytest.mark.parametrize("case", draw_cases(TIMED, count=16, seed=f"timed {SEED}"), ids=str)
def test_a_timed_run_decides_again_what_it_had_decided_when_it_was_killed(case, runs, tmp_path):
    """It follows no other run: what it has come to in the end is made again in one."""
    moment = draw_moment(case, places_of(runs.whole(case.kind), case.kind))
    killed = tmp_path / "killed"
    print(f"seed {SEED}, {case}: {moment}")
    run_to_its_death(Ranks(case.kind, killed, runs.folder, moment))
    run_to_its_end(Ranks(case.kind, killed, runs.folder))
    run_to_its_end(Ranks(case.kind, tmp_path / "again", runs.folder, again=killed))
    assert_same_end(killed / "out", tmp_path / "again" / "out")


def test_fifty_cases_hold_every_kind_stage_death_and_role() -> None:
    cases = draw_cases(KINDS, count=CASES)
    counts: dict[str, set] = defaultdict(set)
    for case in cases:
        counts[case.kind].add(case.number)
        counts[case.stage].add(case.number)
        counts[case.death].add(case.number)
        counts[case.role].add(case.number)
    assert len(cases) == CASES and len(counts) == len(KINDS) + 10 + 3 + 3
    assert min(map(len, counts.values())) >= 3
    assert all(stage_of("push", step) == stage for step, stage in ((0, "first push"), (1, "push")))
