"""Log files: output_dir/logs/attempt_N/rank_K.log, one folder per start of the job."""

from __future__ import annotations

import contextlib
import logging
import re
import sys
from pathlib import Path
from typing import Any, TextIO, cast

from spmdrl.errors import printable
from spmdrl.report.console import Console
from spmdrl.run_folder import make_folder, open_file
from spmdrl.world.world import World

_FORMAT = "%(asctime)s %(levelname).1s rank %(rank)s %(name)s: %(message)s"


def agree_attempt_folder(world: World) -> Path:
    """Make and return logs/attempt_N, where N is the next free number.

    Every rank must call it: rank 0 chooses the number for all.
    """
    output = Path(world.cfg.output_dir)
    logs = output / "logs"
    attempt = world.from_rank_0(lambda: _next_attempt(logs), wait="agree on log folder")
    folder = logs / f"attempt_{attempt}"
    make_folder(folder, within=output)
    return folder


def _next_attempt(logs: Path) -> int:
    matches = [re.fullmatch(r"attempt_(\d+)", path.name) for path in logs.glob("attempt_*")]
    return 1 + max((int(match[1]) for match in matches if match), default=0)


class RankLog:
    """Sends this process's log records to its file, and the important ones to the console.

    The file gets the program's own records from INFO up, records of other libraries, Python
    warnings, and a copy of everything written to sys.stderr (tracebacks, the report of a missed
    deadline). Rank 0's console gets the program's own messages; the stderr of other ranks only
    warnings. `close` undoes all of it.
    """

    def __init__(self, path: Path, *, rank: int, console: Console):
        # path: OUTPUT_DIR/logs/attempt_N/rank_K.log
        text: dict[str, Any] = {"encoding": "utf-8", "errors": "backslashreplace"}
        opened = open_file(path, "a", within=path.parents[2], buffering=1, **text)
        self._file = cast(TextIO, opened)
        self._stderr = sys.stderr
        tee = _Tee(sys.stderr, self._file)
        sys.stderr = tee
        to_file: logging.Handler = logging.StreamHandler(_Quiet(self._file))
        to_file.setLevel(logging.INFO)
        to_file.setFormatter(_Safe(_FORMAT, defaults={"rank": rank}))
        to_stderr = logging.StreamHandler(self._stderr)
        to_stderr.setLevel(logging.WARNING)
        to_person = _ConsoleHandler(console) if rank == 0 else to_stderr
        to_person.setFormatter(_Short(rank))
        self._own = logging.getLogger("spmdrl")
        self._levels = self._own.level
        self._own.setLevel(logging.INFO)
        root = logging.getLogger()
        self._installed = [(root, to_file), (self._own, to_person)]
        if rank == 0:
            to_stderr.addFilter(lambda record: not record.name.startswith("spmdrl"))
            self._installed.append((root, to_stderr))
        for logger, handler in self._installed:
            logger.addHandler(handler)
        logging.captureWarnings(True)

    def close(self) -> None:
        """Take the handlers and the copy of stderr away again and close the file."""
        logging.captureWarnings(False)
        for logger, handler in self._installed:
            logger.removeHandler(handler)
        self._own.setLevel(self._levels)
        if isinstance(sys.stderr, _Tee):
            sys.stderr = self._stderr
        with contextlib.suppress(OSError):  # a full disk: what was buffered is lost
            self._file.close()


class _Safe(logging.Formatter):
    """Makes text of others harmless for the terminal."""

    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))


class _Short(_Safe):
    """Shows the message alone below WARNING, with rank and level from there up."""

    def __init__(self, rank: int):
        super().__init__()
        self._rank = rank

    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        if record.levelno < logging.WARNING:
            return text
        return f"[rank {self._rank}] {record.levelname.lower()}: {text}"


class _ConsoleHandler(logging.Handler):
    """Writes records above the progress line."""

    def __init__(self, console: Console):
        super().__init__(logging.INFO)
        self._console = console

    def emit(self, record: logging.LogRecord) -> None:
        self._console.line(self.format(record))


class _Quiet:
    """A stream whose writes never raise: a full disk must not end a training run."""

    def __init__(self, stream: TextIO):
        self._inner = stream

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError, ValueError):  # no room, or closed while others still log
            self._inner.write(text)
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError, ValueError):  # as above
            self._inner.flush()


class _Tee:
    """sys.stderr that also writes into the log file."""

    def __init__(self, stream: TextIO, copy: TextIO):
        self._stream = stream
        self._copy = _Quiet(copy)

    def write(self, text: str) -> int:
        self._copy.write(text)
        return self._stream.write(text)

    def flush(self) -> None:
        self._copy.flush()
        self._stream.flush()

    def __getattr__(self, name: str) -> object:
        return getattr(self._stream, name)  # encoding, isatty, fileno, ...
