"""Rewards that do what they can to a run: each costs its own sample, and nothing is left of it."""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path

import pytest

from tests.helpers.pool_runs import drained, pool_of, submit, wait_until

pytestmark = pytest.mark.timeout(600)
MODULE = f"{Path(__file__).with_name('hostile_rewards.py')}:score"
SLEEP = b"86399"

FAILING = {
    "raises_exit": "SystemExit: 3",
    "raises_interrupt": "KeyboardInterrupt",
    "raises_generator_exit": "GeneratorExit",
    "raises_base": "BaseException: base",
    "raises_group": "BaseExceptionGroup: many",
    "raises_stop": "StopIteration: 1",
    "raises_unprintable": "its text raises SystemExit",
    "raises_recursion": "RecursionError",
    "raises_refusal": "ValueError: xxx",
    "returns_nan": "finite number, got nan",
    "returns_infinity": "finite number, got -inf",
    "returns_complex": "got 1j",
    "returns_huge_integer": "finite number, got 1000",
    "returns_text": "got '1'",
    "returns_none": "NoneType",
    "returns_type": "class 'float'",
    "returns_hostile": "BaseException",
    "returns_keys": "TypeError: unhashable",
    "returns_empty": "without `score`",
    "returns_hostile_extra": "BaseException",
    "returns_generator": "generator",
    "returns_nested": "RecursionError|list",
    "recurses": "RecursionError|MemoryError|signal 11",
    "exits": "exit code 0",
    "segfaults": "signal 11",
    "kills_its_group": "signal 9",
    "kills_its_keeper": "signal 9",
    "aborts": "signal 6",
    "closes_descriptors": "exit code 1|not a result|no result",
    "prints_to_everything": "not a result: |exit code",
    "writes_a_pickle_as_a_frame": "not a result: ",
    "writes_reports_for_others": "not a result: a result of no job",
    "breaks_builtins": "exit code 1",
    "takes_memory": r"MemoryError: .*worker_memory_gib = 1$",
    "takes_memory_in_children": "used 1.* GiB, above rewards.worker_memory_gib = 1",
}
PASSING = (
    *("returns_surrogate", "returns_a_flood", "forks_and_both_return"),
    *("forks_in_c_and_both_return", "prints", "patches_the_protocol", "empties_modules"),
    *("leaves_a_thread_that_exits", "leaves_threads", "sets_an_alarm"),
    *("leaves_a_thread_that_holds_up_the_end", "sets_handlers", "changes_the_process"),
    *("leaves_a_daemon", "leaves_a_child", "leaves_a_family", "deadlocks_at_exit"),
    "spoils_collection",
)
HANGING = ("sleeps", "spins", "stops_itself", "reads_the_protocol")


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.setenv("HOSTILE_PLACE", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ORIGIN").touch()
    return tmp_path


def sleepers():
    """Return the processes that some kind has left."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if SLEEP in (folder / "cmdline").read_bytes().split(b"\0"):
                found.append(int(folder.name))
    return found


def scored(kinds, **options):
    """Score each kind between innocent samples; return its results by kind."""
    with pool_of(MODULE, **options) as pool:
        for i, kind in enumerate(kinds):
            for key, text in ((f"{i} before", str(i)), (kind, kind), (f"{i} after", str(-i))):
                submit(pool, key, text)
        done = {result.key: result for result in drained(pool)}
        pids = {worker.process.pid for worker in pool._workers}
    assert len(done) == 3 * len(kinds)
    for i, kind in enumerate(kinds):
        for key, value in ((f"{i} before", i), (f"{i} after", -i)):
            assert (done[key].value, done[key].failure) == (value, None), (kind, done[key])
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]
    return done


def check_nothing_is_left(place):
    assert wait_until(lambda: not sleepers()), sleepers()
    assert sorted(os.listdir(place)) == ["ORIGIN"]  # and nothing was executed here


def test_rewards_that_fail_cost_their_own_sample(place):
    done = scored(FAILING, timeout_s=60.0, workers=2, worker_memory_gib=1.0)
    for kind, words in FAILING.items():
        result = done[kind]
        assert result.value is None and result.failure in ("error", "bad_value"), (kind, result)
        assert re.search(words, result.message), (kind, result.message)
        assert len(result.message) <= 2000
    check_nothing_is_left(place)


def test_rewards_that_leave_something_behind_harm_no_other_sample(place):
    done = scored(PASSING, timeout_s=60.0, workers=2)
    for kind in PASSING:
        assert (done[kind].value, done[kind].failure) == (1.0, None), (kind, done[kind])
    check_nothing_is_left(place)


def test_rewards_that_hang_end_at_their_deadline(place):
    done = scored(HANGING, timeout_s=8.0, workers=4)
    for kind in HANGING:
        assert done[kind].failure == "timeout", (kind, done[kind])
    check_nothing_is_left(place)


def test_there_are_forty_and_each_is_tried():
    names = re.findall(r"^@kind\ndef (\w+)|^    \"(r\w+)\": ", Path(MODULE[:-6]).read_text(), re.M)
    assert {a or b for a, b in names} == {*FAILING, *PASSING, *HANGING}
    assert len(names) >= 40
