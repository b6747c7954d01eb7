"""The function to run a program: run_python."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from spmdrl.sandbox.limits import Limits
from spmdrl.sandbox.supervisor import ProgramResult, launch
from spmdrl.sandbox.ways import choose_way, protection


class NotProtected(RuntimeError):
    """This machine cannot block a program's access to files or network."""


def run_python(
    code: str,
    *,
    stdin: str = "",
    timeout_s: float,
    memory_mb: int = 512,
    files: Mapping[str, str | bytes] | None = None,
    packages: Sequence[str] = (),
    processes: int = 8,
    files_mb: int = 64,
    output_bytes: int = 1_000_000,
    allow_unprotected: bool = False,
) -> ProgramResult:
    """Run a program as `main.py` of an empty folder and return its result.

    The program sees the standard library, `files`, and an environment of a few harmless variables
    (PYTHONHASHSEED is 0). When this returns, all processes that it started have ended. Thread-safe.

    Args:
        code: the program.
        stdin: its standard input.
        timeout_s: wall-clock seconds from its first instruction, after which it is killed.
        memory_mb: address space of each process, MiB.
        files: {relative path: content}, written into its folder before it starts.
        packages: folders that it may read and import from, such as a site-packages folder.
        processes: largest number of its processes and threads.
        files_mb: size of each file, MiB; with namespaces also the sum of all files.
        output_bytes: of stdout and of stderr; a program that writes more is killed.
        allow_unprotected: run even if this machine cannot block files or network.
    Raises: NotProtected; LaunchError if the sandbox could not be set up or was killed from outside,
        so that the result is unknown; Refusal for a wrong argument.
    """
    limits = Limits(timeout_s, memory_mb, processes, files_mb, output_bytes)
    check_protection(allow_unprotected=allow_unprotected)
    way = choose_way()[0]
    return launch(code, way=way, limits=limits, stdin=stdin, files=files, packages=packages)


def check_protection(*, allow_unprotected: bool) -> None:
    """Raise NotProtected if this machine does not protect enough, unless that is allowed."""
    result = protection()
    if not result.is_enough and not allow_unprotected:
        raise NotProtected(
            f"{result.text}. To run the code without this protection, with the rights of this "
            "user, set allow_unprotected=True"
        )
