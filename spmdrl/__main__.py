"""`spmdrl COMMAND ...` or `python -m spmdrl COMMAND ...`: run a command; without one, list them."""

from __future__ import annotations

import os
import sys

# Python puts the current folder first, and its yaml.py or json.py may be somebody else's. A
# checkout that this package itself comes from stays. What a config names is found by `imports`.
if __name__ == "__main__" and not __file__.startswith(f"{os.getcwd()}/"):
    sys.path[:] = [place for place in sys.path if os.path.abspath(place) != os.getcwd()]

import ast
import importlib
import signal
from difflib import get_close_matches
from pathlib import Path

from spmdrl.imports import version_text

_FOLDER = Path(__file__).parent / "tools" / "commands"
_COMMANDS = {path.stem: path for path in sorted(_FOLDER.glob("[a-z]*.py"))}
_OTHERS = ("check", "evaluate", "launch", "verify")
"""Commands that start other processes. If one of these closes a pipe, the error must be shown."""


def main() -> int | None:
    """Run the named command with the rest of the arguments; return 2 for one that is unknown."""
    form = "python -m spmdrl" if sys.argv[0] == __file__ else "spmdrl"
    name = sys.argv[1].replace("-", "_") if len(sys.argv) > 1 else "help"
    if name not in _OTHERS or {"-h", "--help"} & {*sys.argv}:
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `... | head` ends without a message
    if name in _COMMANDS:
        sys.argv[:2] = [f"{form} {name}"]
        return importlib.import_module(f"spmdrl.tools.commands.{name}").main()
    # The name has underscores for hyphens: `--version` is `__version`.
    if name == "__version":
        print(version_text())
        return 0
    if name in ("help", "__help", "_h"):
        print(_listed(form))
        return 0
    near = get_close_matches(name, _COMMANDS, n=1)
    print(
        f"{form}: no command {name!r}"
        + (f"; did you mean {near[0]}?" if near else "")
        + "\n\n"
        + _listed(form),
        file=sys.stderr,
    )
    return 2


def _listed(form: str) -> str:
    """Return each command with the first line of its docstring."""
    lines = [
        f"usage: {form} COMMAND ...; --help after a command tells its options",
        f"       {form} --version",
        "",
    ]
    width = max(map(len, _COMMANDS))
    for name, path in _COMMANDS.items():
        text = ast.get_docstring(ast.parse(path.read_text())) or ""
        lines.append(f"  {name:{width}}  {text.splitlines()[0]}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
