"""Print the completion of commands and flags for a shell: bash, zsh or fish.

spmdrl completion bash > ~/.local/share/bash-completion/completions/spmdrl
spmdrl completion zsh > ~/.zfunc/_spmdrl
spmdrl completion fish > ~/.config/fish/completions/spmdrl.fish
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass, field, make_dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from spmdrl.config import Config
from spmdrl.config.read import REGISTRY
from spmdrl.tools.commands import run_command

_NAMES = sorted(path.stem for path in Path(__file__).parent.glob("[a-z]*.py"))


@dataclass(frozen=True)
class _FileFlag:
    config: Path = Path()
    """YAML file to start from."""


def completion(shell: Literal["bash", "zsh", "fish"], /) -> None:
    """Print the completion of commands and flags for a shell.

    Args:
        shell: the shell that reads it.
    """
    tyro.extras.subcommand_cli_from_dict(
        {name.replace("_", "-"): _flags_of(name) for name in _NAMES},
        prog="spmdrl",
        args=["--tyro-print-completion", shell],
        registry=REGISTRY,
    )


def _flags_of(name: str) -> Any:
    """Return a function or a dataclass from which tyro makes the flags of a command."""
    module = importlib.import_module(f"spmdrl.tools.commands.{name}")
    if isinstance(module.main, partial):
        return module.main.args[1]
    if name == "launch":
        return _launch
    own = {"evaluate": ["EvaluateFlags"], "plan": ["PlanFlags"], "train": [], "show_config": []}
    if name not in own:
        return getattr(module, name)
    parts = [_FileFlag, *(getattr(module, flags) for flags in own[name]), Config]
    fields: list[Any] = [
        (f"part_{i}", Annotated[part, tyro.conf.arg(name="")], field(default=part()))
        for i, part in enumerate(parts)
    ]
    return make_dataclass(name, fields)


def _launch(program: Path, /) -> None:
    """Start ranks as torchrun does."""


main = partial(run_command, "completion", completion)
