"""The Dockerfile for GPUs, which no test builds: its versions, its user, and what it takes."""

from __future__ import annotations

import re
import shlex
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILE = ROOT / "docker" / "Dockerfile"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
KNOWN = {"FROM", "RUN", "ENV", "COPY", "USER", "WORKDIR", "CMD"}
SECRET = re.compile(r"key|token|passw|secret|credential", re.IGNORECASE)


def instructions() -> list[tuple[str, str]]:
    """Return (instruction, rest) of each statement, its continued lines joined."""
    lines = [line for line in FILE.read_text().splitlines() if not line.lstrip().startswith("#")]
    text = re.sub(r"\\\n\s*", "", "\n".join(lines))
    return [tuple(line.split(maxsplit=1)) for line in text.splitlines() if line.strip()]


def commands() -> list[list[str]]:
    """Return the words of each command of the RUN statements."""
    runs = [rest for name, rest in instructions() if name == "RUN"]
    return [shlex.split(part) for run in runs for part in run.split("&&")]


def installed() -> list[str]:
    """Return what pip installs."""
    found = [words[2:] for words in commands() if words[:2] == ["pip", "install"]]
    assert all("--no-cache-dir" in words for words in found)
    return [word for words in found for word in words if not word.startswith("-")]


def test_its_statements_are_whole():
    assert {name for name, _ in instructions()} == KNOWN
    assert instructions()[0][0] == "FROM" and all(rest for _, rest in instructions())
    for words in commands():
        assert words[0] in {
            "apt-get",
            "DEBIAN_FRONTEND=noninteractive",
            "rm",
            "python3.12",
            "pip",
            "useradd",
            "install",
        }


def test_pip_installs_the_versions_of_the_extras():
    own = [word for word in installed() if word.startswith("/")]
    pins = [word for word in installed() if not word.startswith("/")]
    assert sorted(pins) == sorted(EXTRAS["gpu"])
    assert own == ["/opt/spmdrl[gpu,tasks,agents,trackers]"]
    assert {"gpu", "tasks", "agents", "trackers"} <= EXTRAS.keys()


def test_cuda_is_that_of_torch_and_python_one_that_the_package_takes():
    (base,) = [rest for name, rest in instructions() if name == "FROM"]
    cuda = re.fullmatch(r"nvidia/cuda:(\d+\.\d+)\.\d+-devel-ubuntu24\.04", base)
    locked = (ROOT / "requirements" / "torch_cuda.txt").read_text()
    assert cuda and f"\ncuda-bindings=={cuda[1]}." in locked
    assert PROJECT["requires-python"] == ">=3.11"
    packages = {word for words in commands() if "apt-get" in words for word in words}
    # Ubuntu 24.04 has Python 3.12 and no other.
    assert {"python3.12-dev", "python3.12-venv", "--no-install-recommends"} <= packages


def test_it_ends_as_a_user_without_rights_and_holds_no_key():
    users = [rest for name, rest in instructions() if name == "USER"]
    assert users and users[-1] not in ("root", "0")
    assert ["useradd", "--create-home", users[-1]] in commands()
    assert not [line for line in instructions() if SECRET.search(" ".join(line))]


@pytest.mark.parametrize("name", [".git", ".venv", "runs", ".env", "slurm", "data", "tests"])
def test_it_takes_along_only_what_is_named(name):
    lines = (FILE.parent / "Dockerfile.dockerignore").read_text().splitlines()
    rules = [line for line in lines if line and not line.startswith("#")]
    assert rules[0] == "*"
    taken = [rule[1:] for rule in rules if rule.startswith("!")]
    assert name not in taken and not [path for path in taken if not (ROOT / path).exists()]
    # What the wheel is built from.
    assert {"pyproject.toml", PROJECT["readme"], "LICENSE", "spmdrl", "train.py"} <= {*taken}
