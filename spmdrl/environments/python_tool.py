"""The tool `python`: runs a program in the sandbox."""

from __future__ import annotations

from spmdrl.imports import refusing
from spmdrl.sandbox import NotProtected, check_protection, run_python
from spmdrl.sandbox.limits import Limits

_MAX_ERROR_CHARS = 800


class Python:
    """Runs programs of the policy in the sandbox, each in a new process; see `sandbox`.

    Args:
        timeout_s: wall-clock seconds of a program. All programs of a turn together must stay below
            rewards.timeout_s, which ends the episode.
        memory_mb: memory of each process, MiB.
        allow_unprotected: run programs even if this machine cannot keep them from files and
            network.
    """

    name = "python"

    def __init__(
        self, *, timeout_s: float = 5.0, memory_mb: int = 512, allow_unprotected: bool = False
    ):
        Limits(timeout_s, memory_mb)  # raises Refusal if out of range
        self.timeout_s = timeout_s
        self.memory_mb = memory_mb
        self.allow_unprotected = allow_unprotected

    def prepare(self) -> None:
        """Raise Refusal if this machine does not protect enough."""
        with refusing("the tool python", NotProtected):
            check_protection(allow_unprotected=self.allow_unprotected)

    def __call__(self, code: str) -> str:
        """Run a Python program and return what it prints. Nothing is kept between programs.

        Args:
            code: The program. It has the standard library, no network and no files. Print
                results.
        """
        result = run_python(
            code,
            timeout_s=self.timeout_s,
            memory_mb=self.memory_mb,
            allow_unprotected=self.allow_unprotected,
        )
        ending = {
            "ok": "",
            "error": result.stderr[-_MAX_ERROR_CHARS:],
            "timeout": f"[stopped after {self.timeout_s:g} s]",
            "output": "[stopped: too much output]",
            "signal": f"[ended by signal {-result.exit_code}]",
        }[result.status]
        parts = [part.rstrip("\n") for part in (result.stdout, ending) if part]
        return "\n".join(parts) or "[no output]"
