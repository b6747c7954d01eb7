"""The tool `python`: runs a program in the sandbox."""

from __future__ import annotations

from spmdrl.environments.tools import BrokenTool
from spmdrl.sandbox import LaunchError, protection, run_python

_MAX_ERROR_CHARS = 800


class Python:
    """Runs programs that the policy wrote; each starts afresh. See `sandbox` for what holds them.

    Args:
        timeout_s: wall-clock seconds of a program; keep a turn's programs together below
            rewards.timeout_s, which ends the episode.
        memory_mb: of each process, MiB.
        allow_unprotected: run although this machine cannot shut programs off from files and
            network.
    """

    name = "python"

    def __init__(
        self, *, timeout_s: float = 5.0, memory_mb: int = 512, allow_unprotected: bool = False
    ):
        if not timeout_s > 0 or memory_mb < 64:
            raise ValueError(
                f"timeout_s must be above 0 and memory_mb at least 64, got "
                f"{timeout_s} and {memory_mb}"
            )
        self.timeout_s, self.memory_mb = timeout_s, memory_mb
        self.allow_unprotected = allow_unprotected

    def prepare(self) -> None:
        """Find out what protects this machine.

        Raises: ValueError when that is not enough.
        """
        found = protection()
        if not found.is_enough and not self.allow_unprotected:
            raise ValueError(
                f"the tool python: {found.text}. To run the policy's programs all the "
                "same, with the rights of this user, set its option "
                "allow_unprotected"
            )

    def __call__(self, code: str) -> str:
        """Run a Python program and return what it prints. Nothing is kept between programs.

        Args:
            code: The program. It has the standard library, no network and no files. Print
                results.
        """
        try:
            result = run_python(
                code,
                timeout_s=self.timeout_s,
                memory_mb=self.memory_mb,
                allow_unprotected=self.allow_unprotected,
            )
        except LaunchError as error:
            raise BrokenTool(f"the sandbox: {error}") from error
        said = {
            "ok": "",
            "error": result.stderr[-_MAX_ERROR_CHARS:],
            "timeout": f"[stopped after {self.timeout_s:g} s]",
            "output": "[stopped: too much output]",
            "signal": f"[ended by signal {-result.exit_code}]",
        }[result.status]
        shown = "\n".join(part.rstrip("\n") for part in (result.stdout, said) if part)
        return shown or "[no output]"
