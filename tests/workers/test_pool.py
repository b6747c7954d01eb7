"""Reward workers are real processes that may do anything; every sample gets one result."""

from __future__ import annotations

import contextlib
import os
import pickle
import random
import re
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import psutil
import pytest

from spmdrl.workers import job_queue
from spmdrl.workers.messages import Setup
from spmdrl.workers.pool import RewardPool
from spmdrl.workers.worker_process import WorkerProcess
from tests.helpers.built import refused
from tests.helpers.pool_runs import (
    drained,
    group_members,
    pool_of,
    results,
    results_of,
    results_side_by_side,
    submit,
    wait_until,
    wait_until_gone,
)

FUNCTIONS = """
import json, os, pathlib, re, subprocess, sys, time

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    word, _, rest = solution_str.partition(" ")
    if word == "raise":
        raise KeyError("lost")
    if word == "deep":
        json.loads("{")
    if word == "exit":
        os._exit(7)
    if word == "sysexit":
        sys.exit(3)
    if word == "segfault":
        os.kill(os.getpid(), 11)
    if word == "hang":
        time.sleep(1000)
    if word == "regex":  # holds the interpreter lock
        re.match(r"(a+)+$", "a" * 60 + "b")
    if word == "child":
        subprocess.Popen(["sleep", "1000"])
        time.sleep(1000)
    if word == "slow":
        time.sleep(float(rest))
    while word == "until" and not pathlib.Path(rest).exists():
        time.sleep(0.02)
    if word == "print":
        print("x" * 100000)
        os.write(1, b"raw bytes on descriptor 1")
        print(sys.stdin.read())
    if word == "value":
        return eval(rest)
    return float(len(solution_str))

def pid(completions, **columns):
    return [float(os.getpid())]
"""


@pytest.fixture
def functions(tmp_path):
    path = tmp_path / "my_rewards.py"
    path.write_text(FUNCTIONS)
    return f"{path}:compute_score"


# --------------------------------------------------------------------------- failures


FAILING = [
    ("raise", "error", "KeyError: 'lost' (.*my_rewards.py:7)"),
    ("deep", "error", r"my_rewards.py:9, in compute_score; raised at .*json/decoder.py:\d+\)"),
    ("exit", "error", "exit code 7"),
    ("sysexit", "error", "SystemExit: 3"),
    ("segfault", "error", "signal 11"),
    ("value float('nan')", "bad_value", "finite number, got nan"),
    ("value float('inf')", "bad_value", "got inf"),
    ("value 'good'", "bad_value", r"got 'good' \(str\)"),
    ("value None", "bad_value", "NoneType"),
    ("value [1.0]", "bad_value", "list"),
    ("value {'acc': 1.0}", "bad_value", "dict without `score`"),
]


def test_a_failing_sample_is_reported_and_costs_only_itself(functions):
    texts = ["ab", *(text for failing, _, _ in FAILING for text in (failing, "abc"))]
    with pool_of(functions) as pool:
        done = results(pool, texts)
    assert [r.value for r in done] == [2.0] + [None, 3.0] * len(FAILING)
    assert [r.failure for r in done[::2]] == [None] * (len(FAILING) + 1)
    for (text, failure, words), found in zip(FAILING, done[1::2], strict=True):
        assert found.failure == failure and re.search(words, found.message), (text, found)
        if failure == "bad_value":
            place = r"compute_score \(.*my_rewards\.py:\d+\): expected "
            assert re.match(place, found.message), (text, found)


def test_a_hanging_sample_is_killed_with_its_group_at_the_deadline(functions):
    texts = {text: ["ab", text, "abc", "abcd"] for text in ("hang", "regex", "child")}
    with contextlib.ExitStack() as stack:
        pools = {t: stack.enter_context(pool_of(functions, timeout_s=3.0)) for t in texts}
        for pool in pools.values():
            pool.start()
        groups = [pool._workers[0].process.pid for pool in pools.values()]
        found = results_side_by_side(pools, texts)
        for group in groups:
            wait_until_gone(group)
    said = r"no result of \w+ \(.*\.py:\d+\) within rewards.timeout_s = 3 s"
    for text, done in found.items():
        # Those after it too: "regex" holds the interpreter lock, so that none is handed back.
        assert [r.value for r in done] == [2.0, None, 3.0, 4.0], text
        assert done[1].failure == "timeout" and re.fullmatch(said, done[1].message), text
        assert 3.0 <= done[1].seconds < 100, text  # of 1000, or for ever


def test_a_late_result_is_a_timeout_even_when_nobody_looked_in_time(functions):
    with pool_of(functions, timeout_s=2.0) as pool:
        pool.start()
        submit(pool, "a", "slow 2.5")
        submit(pool, "b", "xy")
        pool.poll()
        time.sleep(4)
        done = {r.key: r for r in drained(pool)}
    assert done["a"].failure == "timeout" and done["a"].value is None
    assert done["b"].value == 2.0


def test_a_result_that_comes_while_the_rank_stands_still_is_no_timeout(functions, monkeypatch):
    check = RewardPool._check_start

    def stand_still(pool, worker):  # after its results were taken, before its time is looked at
        if worker.jobs:
            time.sleep(3.0)
        check(pool, worker)

    with pool_of(functions, timeout_s=2.5) as pool:
        pool.start()
        submit(pool, 0, "slow 0.5")
        pool.poll()
        monkeypatch.setattr(RewardPool, "_check_start", stand_still)
        assert [(r.value, r.failure) for r in drained(pool)] == [(8.0, None)]


def test_samples_waiting_in_the_queue_do_not_use_up_their_deadline(functions):
    with pool_of(functions, timeout_s=4.0) as pool:
        done = results(pool, ["slow 0.8"] * 6)
    assert [r.failure for r in done] == [None] * 6


def test_prints_and_reads_of_user_code_do_not_disturb_the_protocol(functions, capfd):
    with pool_of(functions) as pool:
        done = results(pool, ["print", "ab", "print"])
    assert [r.value for r in done] == [5.0, 2.0, 5.0]
    assert "raw bytes on descriptor 1" in capfd.readouterr().err


def test_large_samples_pass_both_ways(functions):
    big = "z" * 3_000_000
    with pool_of(functions) as pool:
        submit(pool, 0, "value {'score': 1, 'text': 'y' * 2_000_000}", extra=big)
        for key in range(1, 5):
            submit(pool, key, big, extra=big)
        done = drained(pool)
    assert [r.value for r in done] == [1.0] + [3e6] * 4
    assert len(done[0].extras["text"]) == 500


# --------------------------------------------------------------------------- order, workers


def test_results_do_not_depend_on_order_or_number_of_workers(functions):
    draw = random.Random(0)
    texts = ["x" * draw.randrange(50) for _ in range(300)]
    texts[10], texts[100], texts[200] = "exit", "raise", "value float('nan')"

    def outcome(order, workers):
        found = {}
        with pool_of(functions, workers=workers) as pool:
            for n, key in enumerate(order):
                submit(pool, key, texts[key])
                if n % 7 == 0:
                    found |= {r.key: (r.value, r.failure) for r in pool.poll()}
            rest = drained(pool)
        assert not found.keys() & {r.key for r in rest}
        return found | {r.key: (r.value, r.failure) for r in rest}

    order = list(range(300))
    first = outcome(order, 1)
    assert len(first) == 300 and sum(f is not None for _, f in first.values()) == 3
    draw.shuffle(order)
    assert outcome(order, 2) == first


def test_poll_does_not_wait(functions, tmp_path):
    gate = tmp_path / "gate"
    with pool_of(functions) as pool:
        pool.start()
        submit(pool, 0, f"until {gate}")
        assert pool.poll() == []
        assert len(pool) == 1
        gate.touch()
        assert wait_until(lambda: bool(pool.poll()))


def test_results_come_one_by_one_and_do_not_wait_for_one_that_hangs(functions, tmp_path):
    gate = tmp_path / "gate"
    with pool_of(functions, timeout_s=100.0) as pool:
        for key, text in enumerate(["ab", f"until {gate}", "abc", "abcd"]):
            submit(pool, key, text)
        pool.start()
        coming = results_of(pool)
        # Both behind it were handed to its worker already: they come back, and another does them.
        first = [next(coming) for _ in range(3)]
        assert [(r.key, r.value) for r in first] == [(0, 2.0), (2, 3.0), (3, 4.0)]
        gate.touch()
        assert [r.key for r in coming] == [1] and pool.poll() == []


def test_stand_ins_and_spares_are_bounded_and_nothing_is_left(functions, monkeypatch):
    monkeypatch.setattr(job_queue, "_STUCK_S", 100.0)  # whatever a busy machine does, nothing is
    with pool_of(functions, workers=3, timeout_s=4.0) as pool:
        pool.start()
        results(pool, ["a"] * 20)
        assert len(pool._workers) == 3  # nothing stands by before something fails
        monkeypatch.setattr(job_queue, "_STUCK_S", 1.0)
        groups, most = set(), 0
        for key in range(16):
            submit(pool, key, ["hang", "exit", "segfault", "ab"][key % 4])
        done = []
        while len(pool):
            done += pool.poll()
            groups |= {worker.process.pid for worker in pool._workers}
            most = max(most, len(pool._workers))
            pool.wait()
        done += pool.poll()
    assert sorted((r.key, r.failure) for r in done) == [
        (key, ["timeout", "error", "error", None][key % 4]) for key in range(16)
    ]
    assert 3 < most <= 3 + 3 + 2  # at work, standing in, spare
    for group in groups:
        wait_until_gone(group)
    children = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()
    assert not groups & set(map(int, children)), "a worker that ended was not reaped"


def test_signals_for_the_whole_job_do_not_end_a_worker(functions):
    with pool_of(functions) as pool:
        pool.start()
        submit(pool, 0, "slow 0.5")
        pool.poll()
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
            os.kill(pool._workers[0].process.pid, number)
        done = drained(pool)
    assert done[0].value == 8.0, done[0].message


def test_what_was_put_since_the_last_look_is_begun_before_waiting(functions):
    with pool_of(functions) as pool:
        pool.start()
        results(pool, ["a"])
        waits = []
        for key in range(5):
            submit(pool, key, "ab")
            began = time.monotonic()
            pool.wait()
            waits.append(time.monotonic() - began)
            assert [r.key for r in drained(pool)] == [key]
    assert min(waits) < 0.25  # it was half a second, each time, until a look handed the job out


def test_several_workers_share_slow_samples(functions):
    place = functions.rpartition(":")[0]
    with pool_of(functions, f"{place}:pid", workers=2, weights=(1.0, 0.0), scope="sample") as pool:
        pool.start()
        done = results(pool, ["slow 0.2"] * 10)
    assert len({r.parts["pid"] for r in done}) == 2


def pickled_s(count):
    """Return the seconds of a core that pickling so many samples takes."""
    row, began = {"prompt": "q", "answer": "1"}, time.process_time()
    for number in range(count):
        pickle.loads(pickle.dumps((number, row, "1", [1, 2], False)))
    return time.process_time() - began


def cores_s(pool):
    """Return the seconds of a core that this process and the pool's processes have taken."""
    keepers = [psutil.Process(worker.process.pid) for worker in pool._workers]
    members = [member for keeper in keepers for member in (keeper, *keeper.children())]
    times = [member.cpu_times() for member in members]
    return time.process_time() + sum(each.user + each.system for each in times)


def test_thousands_of_cheap_samples_a_second_go_through_one_worker():
    """A sample takes a fraction of a millisecond of a core, however busy the machine is."""
    with pool_of("spmdrl.rewards.graders:exact") as pool:
        pool.start()
        yardstick_s, began_s = pickled_s(100_000), cores_s(pool)
        done = results(pool, ["1"] * 10000)
        took_s = cores_s(pool) - began_s
        yardstick_s = max(yardstick_s, pickled_s(100_000))
    assert {r.value for r in done} == {1.0}
    assert took_s < 40 * yardstick_s, (took_s, yardstick_s)  # 14 to 21


# --------------------------------------------------------------------------- start and end


def test_workers_start_lazily_without_torch_and_end_with_close(tmp_path):
    path = tmp_path / "f.py"
    path.write_text(
        "import sys, os\ndef f(completions, **k):\n"
        "    return [float('torch' in sys.modules or 'vllm' in sys.modules)]\n"
    )
    pool = pool_of(f"{path}:f")
    assert not pool._workers
    assert results(pool, ["a"])[0].value == 0.0
    pid = pool._workers[0].process.pid
    assert group_members(pid)
    pool.close()
    assert not group_members(pid)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("def f(answer, gold): pass", ["(answer, gold)", "compute_score(", "completions", "entry"]),
        ("def f(completions, environments): pass", ["environments", "default"]),
        ("def f(solution_str, ground_truth, judge): pass", ["judge"]),
        ("def g(): pass", ["no function 'f'", "known: g"]),
        ("import nothing_here", ["ModuleNotFoundError", "nothing_here"]),
        ("import sys; sys.exit(4)", ["SystemExit"]),
    ],
)
def test_unusable_functions_are_refused_at_start(tmp_path, body, words):
    (tmp_path / "f.py").write_text(body)
    with pool_of(f"{tmp_path}/f.py:f") as pool, refused(*words):
        pool.start()


def test_misspelt_places_are_refused_at_start(tmp_path):
    for spec, words in (
        ("nofile.py:f", "no such file"),
        ("no_module:f", "no_module"),
        ("json", "`module:function`"),
    ):
        with pool_of(spec) as pool, pytest.raises(ValueError, match=words):
            pool.start()
    with pytest.raises(ValueError, match="rewards.functions: is empty"):
        pool_of()


def test_a_worker_that_dies_while_loading_is_an_error_not_a_loop(tmp_path):
    (tmp_path / "f.py").write_text("import os; os._exit(9)")
    with pool_of(f"{tmp_path}/f.py:f") as pool, pytest.raises(RuntimeError, match="status 9"):
        pool.start()


def test_workers_die_with_their_parent_whatever_they_are_doing(functions):
    texts = ("hang", "regex", "child", "idle")
    program = textwrap.dedent(f"""
        import sys, time
        sys.path[:0] = {[str(Path(__file__).parents[2])]!r}
        from tests.helpers.pool_runs import pool_of, submit
        pools = [pool_of({functions!r}) for _ in {texts!r}]
        for pool, text in zip(pools, {texts!r}):
            pool.start()
            submit(pool, 0, text)
        for _ in range(20):
            for pool in pools:
                pool.poll()
            time.sleep(0.05)
        print(*(pool._workers[0].process.pid for pool in pools), flush=True)
        time.sleep(1000)
    """)
    parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    try:
        groups = dict(zip(texts, map(int, parent.stdout.readline().split()), strict=True))
        assert all(map(group_members, groups.values())), groups
    finally:
        os.kill(parent.pid, signal.SIGKILL)
        parent.wait()
    for text, group in groups.items():
        gone = wait_until(lambda group=group: not group_members(group))
        assert gone, f"{text}: {group_members(group)} outlived the parent"


def test_a_worker_that_nobody_reads_any_more_ends_without_a_traceback(capfd):
    setup = Setup(functions={"task": "task:addition"}, timeout_s=5.0, weights=(1.0,))
    worker = WorkerProcess(setup)
    worker.stdout.close()  # before it says that it is ready
    try:
        assert wait_until(worker.has_ended)
    finally:
        worker.kill()
    assert capfd.readouterr().err == ""


def test_generated_tasks_bring_their_grader():
    with pool_of(train="task:addition") as pool:
        for key, text in enumerate(["579", " 579 ", "578"]):
            submit(pool, key, text, answer="579", data_source="task:addition")
        done = drained(pool)
    assert [r.value for r in done] == [1.0, 1.0, 0.0]
    assert done[0].parts == {"addition": 1.0}
    assert [r.extras for r in done] == [{"pred": "579"}, {"pred": "579"}, {"pred": "578"}]


def test_reasoning_gym_is_graded_in_the_worker():
    pytest.importorskip("reasoning_gym")
    from spmdrl.data.tasks import make_task

    spec = "reasoning_gym:chain_sum"
    row = make_task(spec, {}, size=10).row(0, 3, split="train")
    with pool_of(train=spec) as pool:
        pool.start()
        submit(pool, 0, row["answer"], **row)
        submit(pool, 1, "none", **row)
        done = drained(pool)
    assert [r.value for r in done] == [1.0, 0.0]
