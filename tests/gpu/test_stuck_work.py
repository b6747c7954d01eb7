"""Work on a GPU that never completes: the watch ends the run by name, within its deadline."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
DEADLINE_S = 1.0
SLACK_S = 5.0  # the watch looks once a second, on a machine that is busy

STUCK = f"""
import json, os, sys, threading, time
from types import SimpleNamespace
from unittest import mock
import torch
import torch.distributed as dist
from spmdrl.columns import AllToAll
from spmdrl.sync import stream, transfer
from spmdrl.world.lost_peers.watch import Watch

def never(*args, **options):
    threading.Event().wait()  # as a wait for the device: the interpreter's lock is free

class Stuck(dist.Work):
    wait = never

def exchange():
    tables = dict(num_leaving=[0, 3], num_arriving=[0, 3], dp_of_rank=[0, 1])
    own = AllToAll(rank=0, **tables, dp_of_sequence=None, group=None)
    with mock.patch.object(dist, "all_to_all_single", never), watch.wait("exchange tokens", 7):
        own.send(torch.ones(3))

def push(move=lambda: None):
    own = object.__new__(stream.WeightStream)
    own.mode, own._pushes = "traced", 3
    own._first = own._later = [SimpleNamespace(move=move, plans=())]
    own._handover = SimpleNamespace(wake_weights=lambda: None, wake_cache=dict)
    own._engine_pointers, own._pointers = tuple, ()
    gpu = torch.device("cuda")
    own._world = SimpleNamespace(watch=watch, control=None, device=gpu, is_inference=False)
    with (
        mock.patch.object(stream, "await_all", lambda **_: None),
        mock.patch.object(torch.cuda, "synchronize", never),
    ):
        own.push(version=7)

def bucket():
    one = transfer._Bucket(operations=[None])
    moving = object.__new__(transfer.Transfer)
    moving._buckets, moving._gather_group = [one], None
    with mock.patch.object(dist, "batch_isend_irecv", lambda operations: [Stuck()]):
        push(moving.run)

found = {{}}
for case in (exchange, push, bucket):
    began = time.monotonic()
    child = os.fork()  # each ends its process
    if not child:
        os.dup2(os.open(f"{{sys.argv[1]}}/{{case.__name__}}", os.O_CREAT | os.O_WRONLY), 2)
        watch = Watch(dist.HashStore(), rank=0, world_size=2, timeout_s={DEADLINE_S})
        case()
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    found[case.__name__] = [status, time.monotonic() - began]
print(json.dumps(found))
"""


def test_the_watch_ends_a_run_whose_work_never_completes(tmp_path: Path) -> None:
    run = subprocess.run(
        [sys.executable, "-c", STUCK, str(tmp_path)],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout)
    for where, name in (("exchange", "exchange tokens"), ("push", "push"), ("bucket", "push")):
        status, seconds = found[where]
        shown = (tmp_path / where).read_text()
        assert status == 13, shown
        assert seconds < DEADLINE_S + SLACK_S, where
        assert "[rank 0] deadline of 1 s passed" in shown
        assert re.search(rf"rank 0 waited \d+ s in '{name}' at step 7", shown)
        assert "rank 1 is missing" in shown
