"""The function that others call: run_python."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from spmdrl.sandbox.limits import Limits
from spmdrl.sandbox.supervisor import ProgramResult, launch
from spmdrl.sandbox.ways import chosen_way, protection


class NotProtected(RuntimeError):
    """This machine cannot keep a program from files or network."""


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

    It sees the standard library, an environment of a few harmless variables (PYTHONHASHSEED is 0)
    and `files`. All that it started is gone when this returns. Thread-safe.

    Args:
        code: the program.
        stdin: its standard input.
        timeout_s: wall-clock seconds from its first instruction, after which it is killed.
        memory_mb: address space of each process, MiB.
        files: {relative path: content}, written beside it before it starts.
        packages: folders that it may import from, such as one of site-packages; readable to it.
        processes: processes and threads that it may have at once.
        files_mb: size of each file, MiB; with namespaces also of all together.
        output_bytes: of stdout and of stderr; a program that writes more is killed.
        allow_unprotected: run although this machine cannot shut off files or network.
    Raises: NotProtected; LaunchError when the sandbox could not be set up or was killed from
        outside, so that nothing is known of the program; Refusal for arguments.
    """
    limits = Limits(timeout_s, memory_mb, processes, files_mb, output_bytes)
    check_protection(allow_unprotected=allow_unprotected)
    way = chosen_way()[0]
    return launch(code, way=way, limits=limits, stdin=stdin, files=files, packages=packages)


def check_protection(*, allow_unprotected: bool) -> None:
    """Raise NotProtected if this machine does not protect enough, unless that is allowed."""
    found = protection()
    if not found.is_enough and not allow_unprotected:
        raise NotProtected(
            f"{found.text}. To run the code all the same, with the rights of this "
            "user, set allow_unprotected=True"
        )
