"""Write the hashes of all pinned packages into the files beside this one: `make lock`.

    python requirements/lock.py              # all files
    python requirements/lock.py cpu.txt      # one

A pin is a line `name==version`; change it and run this. Below each pin stand the sha256 digests of
every wheel of that version that the package index has for CPython 3.11 to 3.13 on Linux with
glibc, x86_64 and aarch64. A package without any wheel gets the digest of its source archive, and
its name stands in a line `--no-binary` at the head of the file. It needs the package `packaging`
and the network.
"""

from __future__ import annotations

import json
import re
import sys
import urllib.request
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from packaging.tags import Tag, compatible_tags, cpython_tags
from packaging.utils import (
    InvalidSdistFilename,
    InvalidWheelFilename,
    canonicalize_name,
    parse_sdist_filename,
    parse_wheel_filename,
)
from packaging.version import Version

HERE = Path(__file__).parent
INDEX = "https://pypi.org/simple"
PIN = re.compile(r"([\w.-]+)==([\w.+!-]+)")
MACHINES = ("x86_64", "aarch64")
_LINUX = "linux_of_ours"
TAGS = frozenset(
    tag
    for minor in (11, 12, 13)
    for tag in (
        *cpython_tags((3, minor), abis=[f"cp3{minor}"], platforms=[_LINUX]),
        *compatible_tags((3, minor), interpreter=f"cp3{minor}", platforms=[_LINUX]),
    )
)
"""What pip would install there, with one name for all platforms of MACHINES."""
LOCAL_BUILDS = {
    "torch==2.13.0+cpu": (  # torch-2.13.0+cpu-cp311-cp311-manylinux_2_28_x86_64.whl
        "6746dbcbeb526eb61330b76b41ff1b4eb848951103a892eeb080dfa2b264667b",
    )
}
"""{pin: digests of files that the index does not have}; see torch_cpu.txt."""


def main(names: list[str]) -> None:
    """Write the hashes of the named files, of all lock files where none is named."""
    paths = [HERE / name for name in names] or sorted(HERE.glob("*.txt"))
    for path in paths:
        path.write_text(locked(path.read_text()))
        print(f"wrote {path}")


def locked(text: str) -> str:
    """Return a lock file with the hashes that the index has now."""
    lines = [line.rstrip(" \\") for line in text.splitlines()]
    lines = [line for line in lines if not line.lstrip().startswith(("--hash", "--no-binary"))]
    pins = [line for line in lines if PIN.fullmatch(line)]
    with ThreadPoolExecutor(8) as pool:
        found = dict(zip(pins, pool.map(files_of, pins)))
    source_only = sorted(pin.split("==")[0] for pin, own in found.items() if own[1] and not own[0])
    written = []
    for line in lines:
        if line not in found:
            written.append(line)
            if line == "--only-binary :all:" and source_only:
                written.append(f"--no-binary {','.join(source_only)}")
            continue
        wheels, archives = found[line]
        digests = [*(wheels or archives), *LOCAL_BUILDS.get(line, ())]
        if not digests:
            sys.exit(f"{line}: the index has no wheel and no source archive of this version")
        written.append(" \\\n    ".join([line, *(f"--hash=sha256:{d}" for d in sorted(digests))]))
    return "\n".join(written) + "\n"


def files_of(pin: str) -> tuple[list[str], list[str]]:
    """Return the digests of the wheels that fit, and of the source archives, of `name==version`."""
    name, version = pin.split("==")
    request = urllib.request.Request(
        f"{INDEX}/{canonicalize_name(name)}/",
        headers={"Accept": "application/vnd.pypi.simple.v1+json"},
    )
    with urllib.request.urlopen(request, timeout=120) as reply:
        return digests_of(json.load(reply)["files"], Version(version))


def digests_of(files: Iterable[dict[str, Any]], version: Version) -> tuple[list[str], list[str]]:
    """Return the digests of the wheels that fit, and of the source archives, of a version.

    Args:
        files: of all versions, as the index lists them.
    """
    wheels = []
    archives = []
    for file in files:
        name, digest = file["filename"], file["hashes"]["sha256"]
        if name.endswith(".whl") and _fits(name, version):
            wheels.append(digest)
        elif name.endswith((".tar.gz", ".zip")) and _is_source(name, version):
            archives.append(digest)
    return wheels, archives


def _fits(name: str, version: Version) -> bool:
    """Return whether a wheel is of this version and for one of our interpreters and machines."""
    try:
        _, own, _, tags = parse_wheel_filename(name)
    except InvalidWheelFilename:  # some old ones are named otherwise
        return False
    return own == version and any(
        Tag(tag.interpreter, tag.abi, _LINUX if _is_linux(tag.platform) else tag.platform) in TAGS
        for tag in tags
    )


def _is_linux(platform: str) -> bool:
    return platform.startswith(("manylinux", "linux")) and platform.endswith(MACHINES)


def _is_source(name: str, version: Version) -> bool:
    """Return whether a file is the source archive of this version."""
    try:
        return parse_sdist_filename(name)[1] == version
    except InvalidSdistFilename:
        return False


if __name__ == "__main__":
    main(sys.argv[1:])
