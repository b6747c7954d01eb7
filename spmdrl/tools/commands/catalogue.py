"""Print the page of all methods from their docstrings, or the page of all metrics.

    python -m spmdrl catalogue > docs/algorithms.md
    python -m spmdrl catalogue metrics

After you add or change a method, write the page again by this command instead of editing it.
"""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from spmdrl.errors import Refusal
from spmdrl.tools.commands import run_command

if TYPE_CHECKING:
    from spmdrl.algorithms.registry import Kind

_TITLES: dict[Kind, tuple[str, str]] = {
    "advantage": ("Advantages", "`algorithm.advantage`"),
    "loss": ("Policy losses", "`algorithm.loss` of the objective `rl`"),
    "correction": ("Corrections of the gap between engine and trainer", "`algorithm.correction`"),
    "kl": ("KL to the reference", "`algorithm.kl`"),
    "preference": ("Preference losses", "`algorithm.loss` of the objective `preference`"),
    "reward_model": ("Reward models", "`algorithm.loss` of the objective `reward_model`"),
    "distillation": ("Distillation", "`algorithm.loss` of the objective `distill`"),
}
# {module: functions that have no name in the config}.
BY_IMPORT = {
    "spmdrl.algorithms.values": ("value_loss",),
    "spmdrl.algorithms.outcome_loss": ("outcome_loss",),
    "spmdrl.algorithms.distillation": ("topk_divergence",),
    "spmdrl.algorithms.entropy": ("top_entropy", "adaptive_entropy_coef"),
    "spmdrl.algorithms.shaping": (
        "penalize_overlong",
        "stop_properly",
        "scale_and_clamp",
        "pass_at_k_estimate",
        "adaptive_kl_coef",
    ),
}


_HEAD = """# Methods

Written by `python -m spmdrl catalogue > docs/algorithms.md` from the docstrings; edit those
instead. Each method is a pure function: import it, or name it in the config. Options are set by the
field's neighbour `..._options`. mu_g and sigma_g are the mean and standard deviation of a group's G
rewards; every sigma is the population's (divided by G, not by G - 1). Log-ratios are clamped to
+-20 where they are exponentiated, and only there."""
_BY_IMPORT = """
## By import

Some of these act in the program through other fields: those of `shaping` by `rewards.shaping` and
`algorithm.kl_control`, those of `entropy` by `algorithm.entropy_control`, `value_loss` and
`outcome_loss` by the section `critic`.
"""


def page() -> str:
    """Return the page, Markdown."""
    from spmdrl.algorithms import registry

    lines = [_HEAD]
    for kind, (title, field) in _TITLES.items():
        methods = [(name, registry.get(kind, name)) for name in registry.names(kind)]
        lines += ["", f"## {title}", "", f"Named by {field}.", *_places(kind), "", *_table(methods)]
    methods = [
        (name, getattr(importlib.import_module(module), name))
        for module, names in BY_IMPORT.items()
        for name in names
    ]
    lines += [_BY_IMPORT, *_table(methods, show_module=True)]
    return "\n".join(lines) + "\n"


def _places(kind: Kind) -> Iterator[str]:
    """Yield the imports of the methods of a kind."""
    from spmdrl.algorithms import registry

    for module in registry.MODULES[kind]:
        names = importlib.import_module(f"spmdrl.algorithms.{module}").__all__
        yield f"`from spmdrl.algorithms.{module} import {', '.join(sorted(names))}`."


def _table(
    methods: list[tuple[str, Callable[..., Any]]], *, show_module: bool = False
) -> Iterator[str]:
    from spmdrl.algorithms import registry

    yield "| name | what it computes | options | source and deviations |"
    yield "| --- | --- | --- | --- |"
    for name, method in methods:
        summary, source = describe(method)
        full_name = f"{method.__module__}.{name}" if show_module else name
        options = ", ".join(
            f"{k} {_option_text(v)}" for k, v in registry.options_of(method).items()
        )
        yield f"| `{full_name}` | {_cell(summary)} | {options or '-'} | {_cell(source)} |"


def describe(method: Callable[..., Any]) -> tuple[str, str]:
    """Return a docstring's first paragraph and its Source section, each on one line.

    Raises: Refusal for a method without either.
    """
    text = inspect.getdoc(method) or ""
    source = re.search(r"^Source: (.*?)(?=^\w[\w ]*:|\Z)", text, flags=re.MULTILINE | re.DOTALL)
    summary = text.split("\n\n")[0]
    if not summary or not source:
        raise Refusal(
            f"{method.__module__}.{method.__name__}: its docstring needs a first "
            "line with the formula and a `Source:`"
        )
    return " ".join(summary.split()), " ".join(source.group(1).split())


def _option_text(value: Any) -> str:
    if isinstance(value, str):
        return f"`{value}`"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _cell(text: str) -> str:
    return text.replace("|", r"\|").replace("*", r"\*")


def catalogue(of: Annotated[Literal["methods", "metrics"], tyro.conf.Positional] = "methods"):
    """Print the page of all methods from their docstrings, or the page of all metrics.

    Args:
        of: which page.
    """
    from spmdrl.report.glossary import PAGE

    print(page() if of == "methods" else PAGE.read_text(encoding="utf-8"), end="")


main = partial(run_command, "catalogue", catalogue)
