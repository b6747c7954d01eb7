"""Alternatives: sets of algorithm settings that differ from a run's own."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from spmdrl.check.settings import validate
from spmdrl.config import Config, flatten, from_tree
from spmdrl.config.files import as_flow
from spmdrl.config.tree import leaves
from spmdrl.config.yaml_text import plain_data
from spmdrl.errors import Refusal
from spmdrl.tools.foreign_code import METHODS

AS_RUN = "as run"
"""Name of the run's own settings."""


@dataclass(frozen=True)
class Alternative:
    """A set of algorithm settings, with a name for tables and pages."""

    name: str
    cfg: Config
    """The config of the run with these settings."""
    settings: Mapping[str, Any]
    """{field of algorithm: value} of the settings that differ; {} for the run's own settings."""


def alternatives(
    cfg: Config,
    *,
    losses: Sequence[str] = (),
    advantages: Sequence[str] = (),
    corrections: Sequence[str] = (),
    others: Sequence[str] = (),
) -> list[Alternative]:
    """Return the alternatives that a command line names.

    Args:
        cfg: of the run.
        losses, advantages, corrections: names. Every combination of one of each is an alternative.
            A kind without names stays as in the run.
        others: one alternative each, as a YAML mapping of fields of `algorithm`.
    Raises: Refusal with the name of the alternative, if there is none, if one is named twice, or
        for an unknown field or method, a function that fails on three tokens, or settings that
        cannot be combined.
    """
    names_by_field = {"loss": losses, "advantage": advantages, "correction": corrections}
    axes = [[(field, name) for name in names] for field, names in names_by_field.items() if names]
    choices: list[dict[str, Any]] = [dict(pairs) for pairs in itertools.product(*axes) if pairs]
    choices += [_mapping(text) for text in others]
    if not choices:
        raise Refusal(
            "no alternative is named; give e.g. --loss gspo cispo, --correction icepop or "
            "--alternative '{loss: cispo, correction: none}'"
        )
    result = [_alternative(cfg, settings) for settings in choices]
    names = [one.name for one in result]
    for name in names:
        if names.count(name) > 1:
            raise Refusal(f"the alternative {name!r} is named twice")
    return result


def _mapping(text: str) -> dict[str, Any]:
    settings = plain_data(text)
    if not isinstance(settings, dict) or not settings:
        raise Refusal(
            f"--alternative {text}: expected a mapping of fields of algorithm, e.g. "
            "'{loss: cispo, loss_options: {clip_high: 4.0}}'"
        )
    return settings


def _alternative(cfg: Config, settings: dict[str, Any]) -> Alternative:
    settings = settings | _own_aggregation(cfg, settings)
    name = ", ".join(f"{field} {as_flow(value)}" for field, value in settings.items())
    if "objective" in settings:
        raise Refusal(
            f"alternative {name}: the objective cannot change, because the run sampled for its own "
            f"({cfg.algorithm.objective})"
        )
    problems: list[str] = []
    changes = leaves({"algorithm": settings}, problems=problems)
    base = {n: v for n, v in flatten(cfg).items() if n.startswith("algorithm.")}
    for kind in METHODS:
        run_method = getattr(cfg.algorithm, kind)
        if settings.get(kind, run_method) != run_method:
            base[f"algorithm.{kind}_options"] = {}  # the run's options are of another method
    algorithm = from_tree(base | changes, where=f"alternative {name}").algorithm
    changed = replace(cfg, algorithm=algorithm)
    known = validate(cfg)  # problems of the run's own config do not matter here
    problems += [problem for problem in validate(changed) if problem not in known]
    if problems:
        raise Refusal("\n  ".join([f"alternative {name}:", *problems]))
    return Alternative(name, changed, settings)


def _own_aggregation(cfg: Config, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return an aggregation for a loss that does not allow that of the run, if none is named."""
    from spmdrl.algorithms import registry

    if "loss" not in settings or "aggregation" in settings:
        return {}
    aggregations = getattr(registry.get("loss", str(settings["loss"])), "aggregations", ())
    if not aggregations or cfg.algorithm.aggregation in aggregations:
        return {}
    return {"aggregation": aggregations[0]}
