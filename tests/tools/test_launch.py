"""`python -m spmdrl launch`: torchrun's ranks, and nothing said but what they say."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from spmdrl.tools.commands.launch import main
from tests.helpers.runs import ROOT

PROGRAM = r"""
import os, signal, sys
rank, how = int(os.environ["RANK"]), sys.argv[1]
assert os.environ["WORLD_SIZE"] == "2" and sys.argv[2:] == ["--standalone-too", "x"]
os.write(1, f"rank {rank} is here\n".encode())  # whole: the ranks share a pipe
if how == "dies" and rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
if how == "refuses":
    os.write(2, f"rank {rank} says no\n".encode())
    sys.exit(1)
"""


@pytest.mark.parametrize(
    ("how", "status", "said"),
    [
        ("ends", 0, []),
        ("refuses", 1, ["rank 0 says no", "rank 1 says no"]),
        ("dies", 137, ["rank 1 was ended by SIGKILL"]),
    ],
)
def test_ranks_start_and_only_they_speak(tmp_path: Path, how, status, said):
    (tmp_path / "program.py").write_text(PROGRAM)
    command = [sys.executable, "-m", "spmdrl", "launch", "--nproc_per_node", "2"]
    done = subprocess.run(
        [*command, str(tmp_path / "program.py"), how, "--standalone-too", "x"],
        text=True,
        capture_output=True,
        cwd=ROOT,
        timeout=300,
    )
    assert done.returncode == status, done.stderr
    assert {"rank 0 is here", "rank 1 is here"} >= set(done.stdout.splitlines())
    lines = done.stderr.splitlines()
    assert set(lines) <= set(said) and bool(lines) == bool(said), done.stderr


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (["--nproc-per-node", "two"], "Unsupported nproc_per_node value: two"),
        (["--nproc-per-node", "0"], "a number is out of range"),
        (["--nnodes", "2:1"], "min_nodes=2"),
        (["--nnodes", "1", "--rdzv-backend", "none_such"], "'none_such' is not registered"),
    ],
)
def test_options_that_torchrun_cannot_use_are_refused_in_a_line(options, why, capsys):
    assert main([*options, "program.py", "--nnodes", "9"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("launch: ") and why in line and f": {' '.join(options)};" in line
