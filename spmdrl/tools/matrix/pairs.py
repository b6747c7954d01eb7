"""The verdict on each pair of features."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Literal

from spmdrl.check.rules import broken_rules
from spmdrl.check.rules.rule import RuleKind
from spmdrl.config.files import as_flow
from spmdrl.tools.matrix.features import FEATURES, Feature, config_of
from spmdrl.tools.matrix.proofs import proofs
from spmdrl.world.axes import axes_of, rank_problems

_DEVICES = ("cpu", "cuda")


@dataclass(frozen=True)
class Pair:
    """Two features, and the verdict on their combination."""

    first: str
    second: str
    verdict: Literal["proved", "refused", "untried"]
    evidence: str = ""
    """The test that proves it, or the reason why it is refused."""
    kind: RuleKind | None = None
    """The kind of the rule that refuses it."""


def pairs() -> list[Pair]:
    """Return every pair of features, in the order of their table."""
    tests = {
        frozenset(two): proof.test
        for proof in proofs()
        for two in itertools.combinations(proof.features, 2)
    }
    return [
        _pair(first, second, test=tests.get(frozenset((first.name, second.name)), ""))
        for first, second in itertools.combinations(FEATURES, 2)
    ]


def _pair(first: Feature, second: Feature, *, test: str) -> Pair:
    names = (first.name, second.name)
    refused = _refusal(first, second)
    if refused:
        return Pair(*names, "refused", *refused)
    return Pair(*names, "proved", test) if test else Pair(*names, "untried")


def _refusal(first: Feature, second: Feature) -> tuple[str, RuleKind] | None:
    """Return why a config with both is refused, and the kind of the rule; None if it is not."""
    both = {*first.settings} & {*second.settings}
    for name in sorted(both):
        values = (first.settings[name], second.settings[name])
        if values[0] != values[1]:
            return f"{name}: {as_flow(values[0])} or {as_flow(values[1])}, not both", "principle"
    for device in _DEVICES:
        cfg = config_of(first, second, device=device)
        # Some features are for CPUs alone: that refuses no pair.
        alone = broken_rules(config_of(first, device=device))
        alone += broken_rules(config_of(second, device=device))
        rules = [rule for rule in broken_rules(cfg) if rule not in alone]
        where = "" if device == _DEVICES[0] else f" (on {device})"
        if rules:
            return rules[0].problem(cfg) + where, rules[0].kind
        layout_problems = [*rank_problems(axes_of(cfg), engine_kind=cfg.engine.kind)]
        if layout_problems:
            return layout_problems[0] + where, "principle"
    return None
