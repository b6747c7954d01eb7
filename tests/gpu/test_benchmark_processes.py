"""What benchmarks start: it ends with them, and its errors can be read."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import psutil
import pytest

from benchmarks import start

ROOT = Path(__file__).parents[2]


def test_a_program_that_does_not_end_takes_what_it_started_with_it(tmp_path):
    pid = tmp_path / "pid"
    program = (
        "import subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(1000)'],"
        " start_new_session=True)\n"
        f"open({str(pid)!r}, 'w').write(str(child.pid))\n"
        "print('began', flush=True); time.sleep(1000)\n"
    )
    with pytest.raises(RuntimeError, match="no end in 4 s; last words: began"):
        start.output_of([sys.executable, "-c", program], timeout_s=4)
    number = int(pid.read_text())
    assert not psutil.pid_exists(number) or psutil.Process(number).status() == "zombie"


def test_the_last_words_are_those_of_a_rank_and_not_of_its_launcher():
    printed = (
        "[rank0]: ValueError: model.path nowhere: no such folder\n"
        "  File '/torch/distributed/run.py', line 5: raise RuntimeError(x)\n"
        "torch.distributed.elastic.multiprocessing.errors.ChildFailedError:\n"
        "  error_file: <N/A>\n"
        "============\n"
    )
    assert start.last_words(printed) == "[rank0]: ValueError: model.path nowhere: no such folder"
    assert start.last_words("") == "nothing printed"
    assert (
        start.last_words(f"ValueError: at {start.ROOT}/train.py:63") == "ValueError: at train.py:63"
    )


def test_ranks_find_packages_where_this_process_does(monkeypatch):
    found = {}
    monkeypatch.setattr(start, "output_of", lambda words, **own: found.update(own))
    monkeypatch.setenv("PYTHONPATH", "/tmp/site")
    start.torchrun(1, "train.py", timeout_s=9)
    assert found["variables"]["PYTHONPATH"] == f"{ROOT}{os.pathsep}/tmp/site"
