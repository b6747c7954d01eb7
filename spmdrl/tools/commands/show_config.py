"""Show the resolved config of files and flags, and the file and line that set each value.

    python -m spmdrl show_config --config configs/recipes/dapo_qwen3_8b.yaml --steps 100

What it prints is YAML that `--config` takes. A value without a comment is a default.
"""

from __future__ import annotations

import sys

from spmdrl.config.files import dump_places
from spmdrl.config.read import places_of, read
from spmdrl.errors import Refusal, say
from spmdrl.tools.commands import typed


def main(argv: list[str] | None = None) -> int:
    """Print the config and return the exit status: 2 for a config that cannot be read."""
    argv = list(sys.argv[1:] if argv is None else argv)
    try:
        cfg = read(argv, prog=f"{typed('show_config')} --config FILE")
        say(dump_places(cfg, places_of(argv)))
    except Refusal as error:
        say(error, file=sys.stderr)
        return 2
    return 0
