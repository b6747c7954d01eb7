"""`python -m spmdrl`: what it lists, and that each command says how it is used, at once."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys

import pytest

from spmdrl import __version__
from spmdrl.__main__ import _COMMANDS
from spmdrl.check.settings import parse
from tests.helpers.runs import ROOT


def spmdrl(*arguments: str, python: tuple[str, ...] = ()) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, *python, "-m", "spmdrl", *arguments],
        capture_output=True,
        text=True,
        cwd=ROOT,
    )


@pytest.mark.parametrize("name", sorted(_COMMANDS))
def test_help_of_a_command_names_it_and_waits_for_no_large_import(name):
    found = spmdrl(name, "--help", python=("-X", "importtime"))
    assert found.returncode == 0, found.stderr[-2000:]
    assert f"python -m spmdrl {name}" in found.stdout
    if name.startswith("plan"):
        return  # its modules import torch before the command line is read
    large = {"torch", "transformers", "vllm", "pyarrow", "mlflow", "matplotlib"}
    assert not large & set(re.findall(r"\| +(\w+)$", found.stderr, flags=re.MULTILINE))


def test_commands_are_listed_and_a_wrong_name_is_answered_with_the_nearest():
    listed = spmdrl()
    assert listed.returncode == 0
    for name in _COMMANDS:
        (line,) = re.findall(rf"^  {name} +(.*)", listed.stdout, flags=re.MULTILINE)
        assert 20 < len(line) < 90 and line.endswith(".") and "spmdrl" not in line
    wrong = spmdrl("exprot")
    assert wrong.returncode == 2 and "did you mean export?" in wrong.stderr


def test_versions_are_printed_by_the_program_and_the_commands(capsys):
    of_commands = spmdrl("--version")
    assert of_commands.returncode == 0
    with pytest.raises(SystemExit) as ended:
        parse(["--config", "nowhere.yaml", "--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == of_commands.stdout
    lines = of_commands.stdout.splitlines()
    assert lines[0] == f"spmdrl {__version__}" and lines[-1].startswith("Python 3.")
    assert any(line.startswith("torch ") for line in lines)


@pytest.mark.parametrize("words", [("verify", "--help"), ("help",)])
def test_what_nobody_reads_to_its_end_ends_without_a_word(words):
    read, write = os.pipe()
    os.close(read)  # as `| head` that has left
    command = [sys.executable, "-m", "spmdrl", *words]
    try:
        found = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True, cwd=ROOT)
    finally:
        os.close(write)
    assert found.returncode == -signal.SIGPIPE and found.stderr == ""
