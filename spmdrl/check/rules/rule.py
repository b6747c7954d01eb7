"""A rule about settings that do not go together, and its message."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from spmdrl.config.fields import Config
from spmdrl.config.files import as_flow

RuleKind = Literal["principle", "not built", "untried"]
"""`principle`: cannot be right, or has no effect; `not built`: could be, and nobody wrote it;
`untried`: may be right, and no test shows it."""


@dataclass(frozen=True)
class Rule:
    """Settings that do not go together."""

    fields: tuple[str, ...]
    """Dotted names: the one to change first, then those that it conflicts with."""
    when: Callable[[Config], object]
    """Returns whether a config breaks the rule."""
    reason: str
    remedy: str | Callable[[Config], str]
    kind: RuleKind = "principle"

    def problem(self, cfg: Config) -> str:
        """Return `field: value with field value; reason; remedy`."""
        first = self.fields[0]
        others = self.fields[1:]
        text = f"{_named(cfg, first)}: {_text(setting(cfg, first)) or 'is empty'}"
        if others:
            text += " with " + " and ".join(_with_value(cfg, name) for name in others)
        remedy = self.remedy if isinstance(self.remedy, str) else self.remedy(cfg)
        return f"{text}; {self.reason}; {remedy}"


def of_agents(
    field: str, when: Callable[[Config], object], reason: str, remedy: str, kind: RuleKind
) -> Rule:
    """Return the rule against a setting where episodes may have several traces."""
    return Rule(
        (field, "rollout.agent"),
        lambda cfg: cfg.objective.samples and cfg.rollout.has_agent and when(cfg),
        reason,
        remedy,
        kind,
    )


def _text(value: Any) -> str:
    """Return a value as YAML; empty for no value."""
    if dataclasses.is_dataclass(value):
        return "is set"  # a whole section
    return as_flow(value) if value or value == 0 else ""


def _with_value(cfg: Config, name: str) -> str:
    value = setting(cfg, name)
    if dataclasses.is_dataclass(value):
        return name  # a whole section
    return f"{_named(cfg, name)} {_text(value) or 'empty'}"


def _named(cfg: Config, name: str) -> str:
    """Return the field that holds the environment for `rollout.environment`, or the agent for
    `rollout.agent`, else the name."""
    if name == "rollout.agent" and not cfg.rollout.agent:
        return "rollout.agent_command"
    environments = cfg.environment_fields() if name == "rollout.environment" else {}
    return next(iter(environments), name)


def setting(cfg: Config, name: str) -> Any:
    """Return the value of a field or of an option; None for an option that is not set."""
    if name == "rollout.environment":
        return next(iter(cfg.environment_fields().values()), {})
    if name == "rollout.agent":
        return cfg.rollout.agent or [*cfg.rollout.agent_command]
    value: Any = cfg
    for part in name.split("."):
        value = value.get(part) if isinstance(value, dict) else getattr(value, part)
    return value
