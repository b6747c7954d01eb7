"""One table of the settings that do not go together; `python -m spmdrl matrix` prints it.

A rule is about two settings or more, and needs neither the model nor the rows. Checks of single
values are in config/ranges.py and in the files of check/; sizes that must divide are in
world/axes.py.
"""

from __future__ import annotations

from spmdrl.check.rules.methods import METHODS
from spmdrl.check.rules.rule import Rule
from spmdrl.check.rules.sampling import SAMPLING
from spmdrl.check.rules.weights import WEIGHTS
from spmdrl.config.fields import Config

RULES: tuple[Rule, ...] = (*SAMPLING, *METHODS, *WEIGHTS)


def broken_rules(cfg: Config) -> list[Rule]:
    """Return the rules that a config breaks."""
    return [rule for rule in RULES if rule.when(cfg)]


def rule_problems(cfg: Config) -> list[str]:
    """Return what does not go together in a config, each as `field: what, value seen, reason, what
    to do`."""
    return [rule.problem(cfg) for rule in broken_rules(cfg)]
