"""The host's memory: how much is left, who holds it, and when that is said."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import pytest

from spmdrl.world.machine import host_memory as memory
from spmdrl.world.machine.host_memory import HostMemory, MemoryWatch

GIB = 2**30


def test_a_container_has_what_its_limit_leaves(tmp_path):
    whole = memory.host_memory(tmp_path)
    assert 0 < whole.free < whole.total
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("5\n")
    assert memory.host_memory(tmp_path).total == whole.total
    (tmp_path / "memory.max").write_text("1000\n")
    assert memory.host_memory(tmp_path) == HostMemory(free=995, total=1000)
    (tmp_path / "memory.current").write_text("1001\n")
    assert memory.host_memory(tmp_path).free == 0


def test_kills_are_counted_for_either_version_of_cgroups(tmp_path):
    before = memory.kills(tmp_path)
    (tmp_path / "memory").mkdir()
    (tmp_path / "memory/memory.oom_control").write_text(f"under_oom 0\noom_kill {before + 1}\n")
    assert memory.kills(tmp_path) == before + 1
    (tmp_path / "memory.events").write_text(f"oom 3\noom_kill {before + 2}\n")
    assert memory.kills(tmp_path) == before + 2


HOLD = """
import sys
held = bytearray(b"x") * int(sys.argv[1])
print("held", flush=True)
sys.stdin.read()
"""


def test_the_largest_holder_is_named_by_rank_process_and_command():
    """A process that holds more than any other here."""
    most = max(size for size, _ in memory._processes())
    if memory.host_memory().free < 2 * most:
        pytest.skip("no room for a process that is the largest of this machine")
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(most + 2**28)],
        env=os.environ | {"RANK": "7"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        assert process.stdout.readline() == b"held\n"
        first = memory.largest_holders(1)[0]
        process.stdin.close()
    assert f"process {process.pid} of rank 7, " in first and "GiB" in first, first
    assert Path(sys.executable).name in first, first


def test_a_warning_comes_when_little_is_left_and_again_at_each_half():
    free = [0.5]
    watch = MemoryWatch(lambda: HostMemory(int(free[0] * 100 * GIB), 100 * GIB))
    assert watch.look() == ""
    said = []
    for free[0] in (0.049, 0.048, 0.03, 0.024, 0.02, 0.011, 0.2, 0.051, 0.04, 0.03):
        said.append(bool(watch.look()))
    assert said == [True, False, False, True, False, True, False, False, True, False]
    free[0] = 0.01
    text = watch.look()
    assert "1.00 of 100.0 GiB are left" in text and "The largest: process " in text


def test_a_bad_end_says_that_the_kernel_killed(monkeypatch):
    killed = [3]
    monkeypatch.setattr(memory, "kills", lambda: killed[0])
    watch = MemoryWatch()
    assert watch.tell_kills() == ""
    killed[0] = 5
    assert "killed 2 processes of this host" in watch.tell_kills()


ROUNDS = """
import resource, sys
import numpy
from spmdrl.world.machine.host_memory import keep_freed_memory
if sys.argv[1] == "kept":
    keep_freed_memory()
for _ in range(6):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    arrays = [numpy.full(2**20, 1.0) for _ in range(4)]  # 32 MiB
    del arrays
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(
    not hasattr(ctypes.CDLL(None), "gnu_get_libc_version"), reason="another malloc than glibc's"
)
def test_memory_that_is_freed_and_taken_again_is_kept():
    found = {
        name: int(subprocess.check_output([sys.executable, "-c", ROUNDS, name], timeout=120))
        for name in ("kept", "default")
    }
    # 32 MiB are 8192 pages.
    assert found["kept"] < 1000 < found["default"], found
