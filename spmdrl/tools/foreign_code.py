"""What a config that somebody else may have written would have this machine run."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from spmdrl.config import Config, load_yaml
from spmdrl.errors import Refusal
from spmdrl.rewards.signatures import reward_models
from spmdrl.workers.environment_jobs import BUILT_IN
from spmdrl.world.own_runs import is_own

# The whole name: `spmdrl.rewards./../evil.py:f` and `task:x/../evil.py:f` are files of others.
_OURS = re.compile(r"spmdrl\.rewards\.\w+:\w+")
_TASK = re.compile(r"(task|reasoning_gym):\w+")
"""Where a generated task is asked for; elsewhere `task:f` is a function of the module `task`."""
_MCP = re.compile(r"\.tools\.mcp\b")
"""Options of MCP servers: commands, addresses, and variables that say what a command runs."""


def named_code(cfg: Config) -> list[str]:
    """Return the fields by which a config has its reader run code, or takes away what contains
    it, each as `field: value`; without the code of a model's folder."""
    rewards = cfg.reward_functions
    found = [
        f"rewards.functions: {spec}"
        for i, spec in enumerate(rewards)
        if i not in reward_models(rewards) and not (_TASK.fullmatch(spec) or _OURS.fullmatch(spec))
    ]
    environments = {"rollout.environment": cfg.rollout.environment} | cfg.environment_fields()
    for field, options in environments.items():
        for name, value in _leaves(options, field):
            if _is_ours(name, value, field=field, kind=options.get("name")):
                continue
            is_named = name.endswith((".name", ".allow_unprotected", ".taskset")) or _MCP.search(
                name
            )
            if _is_code(value) or is_named:
                found.append(f"{name}: {value}")
    if cfg.rollout.agent:
        found.append(f"rollout.agent: {cfg.rollout.agent}")
    if cfg.rollout.agent_command:
        found.append(f"rollout.agent_command: {' '.join(cfg.rollout.agent_command)}")
    options = {k: v for k, v in cfg.engine.options.items() if not isinstance(v, (bool, int, float))}
    return found + [f"engine.options.{name}: {value}" for name, value in options.items()]


METHODS = ("advantage", "loss", "correction", "kl")
"""Fields of `algorithm` that name a function, each with options of its own beside it."""


def trusted_config(run: Path, *, trust_run: bool, trust_remote_code: bool) -> Config:
    """Return the config of a run, which may be somebody else's, to train on what that recorded.

    Args:
        run: output_dir.
        trust_run: the methods that the config names may run. trust_remote_code: Python code of the
            model's folder may.
    Raises: Refusal naming the code that nobody allowed, and the flags that allow it; as
        `load_yaml`.
    """
    cfg = load_yaml(run / "config.yaml")
    named = [(kind, getattr(cfg.algorithm, kind)) for kind in METHODS]
    code = [f"algorithm.{kind}: {name}" for kind, name in named if ":" in name and not trust_run]
    of_model = cfg.model.trust_remote_code and not trust_remote_code
    refuse_code(code, run / "config.yaml", of_model=of_model)
    return cfg


def refuse_code(code: list[str], file: Path, *, of_model: bool, otherwise: str = "") -> None:
    """Refuse the code that a config names, where nobody allowed it and the run is not this user's
    own, see `own_runs`.

    Args:
        code: fields that name some, each as `field: value`, to be allowed by --trust-run.
        file: that holds the config. of_model: the code of the model's folder is not allowed too.
        otherwise: what may be done instead of allowing it.
    Raises: Refusal naming the code, and the flags that allow it.
    """
    hints = ["--trust-run"] * bool(code) + ["--trust-remote-code"] * of_model
    is_yours, why = is_own(file) if hints else (True, "")
    if not is_yours:
        raise Refusal(
            f"{file} may be somebody else's, and would run code here:\n  "
            + "\n  ".join([*code, *["model.trust_remote_code: true"] * of_model])
            + f"\nLook at it, then allow it by {' and '.join(hints)}{otherwise}"
            + (f"\nWhether the run is your own cannot be told: {why}" if why else "")
        )


def _leaves(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Yield (dotted name, value) of all that options hold, keys that look like code too."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            if _is_code(key):
                yield name, key
            yield from _leaves(inner, f"{name}.{key}")
    elif isinstance(value, (list, tuple)):
        for inner in value:
            yield from _leaves(inner, name)
    else:
        yield name, value


def _is_ours(name: str, value: Any, *, field: str, kind: Any) -> bool:
    """Whether an option of an environment names what comes with the program: the environment, or
    the generated task that `task` plays."""
    if name == f"{field}.name":
        return value in BUILT_IN
    return name == f"{field}.task" and kind == "task" and bool(_TASK.fullmatch(str(value)))


def _is_code(value: Any) -> bool:
    """Whether a value can be `module:NAME` or `path/file.py:NAME`, alone or in a list of names."""
    return isinstance(value, str) and ":" in value
