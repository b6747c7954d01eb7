"""Write a page of runs: curves, time, rollouts, settings; or show rollouts as text.

    python -m spmdrl view runs/mine                                # writes runs/mine/page.html
    python -m spmdrl view runs/mine runs/other --html both.html    # several runs over each other
    python -m spmdrl view runs/mine --follow                       # again and again while it trains
    python -m spmdrl view runs/mine --list-steps
    python -m spmdrl view runs/mine --step 12 --sort spread
    python -m spmdrl view runs/mine --step 12 --group 3 --tokens

A run records rollouts by rollout.record; see docs/rollouts.md.
"""

from __future__ import annotations

import time
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from spmdrl.errors import Refusal, say
from spmdrl.imports import refusing
from spmdrl.report.recorded_groups import GroupReader, summaries
from spmdrl.tools.commands import run_command
from spmdrl.tools.rollouts.terminal import group_text, groups_text, steps_text

if TYPE_CHECKING:
    from spmdrl.report.page.write import RunPage

_FOLLOW_S = 5.0


def view(
    runs: Annotated[list[Path], tyro.conf.Positional],
    *,
    html: Path | None = None,
    follow: bool = False,
    limit_mib: float = 64.0,
    limit_s: float = 120.0,
    list_steps: bool = False,
    step: int | None = None,
    group: int | None = None,
    sort: Literal["", "length", "reward", "spread"] = "",
    limit: int = 40,
    tokens: bool = False,
    tokenizer: str = "",
    trust_remote_code: bool = False,
) -> str:
    """Write the page of one or more runs; or show recorded rollouts of one as text.

    Args:
        runs: output_dir of each, or a folder of rollouts.
        html: the page to write; by default page.html in the first run's folder. With --step,
            the page has the rollouts of that step alone.
        follow: write the page again every few seconds until the runs have done all their steps.
        limit_mib: MiB of rollouts, and of timelines, on the page.
        limit_s: seconds for reading each of the two.
        list_steps: list the recorded steps.
        step: list its groups.
        group: show its responses; needs --step.
        sort: order of the groups, largest first; by number if left out.
        limit: groups to list.
        tokens: token by token, with logprobs.
        tokenizer: folder of the tokenizer, if not the run's.
        trust_remote_code: run Python code of the tokenizer's folder.
    Returns: the text to print.
    Raises: Refusal for a folder, step or group that does not exist.
    """
    for flag, asked, needs, given in (
        ("--group", group is not None, "--step", step is not None),
        ("--tokens", tokens, "--step and --group", group is not None),
    ):
        if asked and not given:
            raise Refusal(f"{flag} needs {needs}")
    reads = dict(tokenizer=tokenizer, trust_remote_code=trust_remote_code)
    if html is None and (list_steps or step is not None):
        if len(runs) != 1:
            raise Refusal(f"--list-steps and --step show one run; {len(runs)} are named")
        return _text(runs[0], step, group, tokens, sort, limit, **reads)
    choice = dict(step=step, group=group, **reads)
    for name, value in (("--limit-mib", limit_mib), ("--limit-s", limit_s)):
        if not value > 0:
            raise Refusal(f"{name} {value:g}: expected a number above 0")
    return _page(runs, html, follow=follow, limits=(limit_mib, limit_s), choice=choice)


def _text(
    folder: Path,
    step: int | None,
    group: int | None,
    tokens: bool,
    sort: str,
    limit: int,
    **options: Any,
) -> str:
    """Return a folder's steps, a step's groups or one group as text."""
    from spmdrl.rollout.recordings import find_recorded, reading

    recorded = find_recorded(folder)
    with reading(recorded.folder):
        if step is None:
            return steps_text(recorded)
        if group is None:
            return groups_text(summaries(recorded, step), sort=sort, limit=limit)
        (found,) = GroupReader(recorded, needs_text=tokens, **options).read(step, group)
        return group_text(found, tokens=tokens)


def _page(
    runs: list[Path],
    html: Path | None,
    *,
    follow: bool,
    limits: tuple[float, float],
    choice: dict[str, Any],
) -> str:
    """Write the page and return a text that says where it is.

    Args:
        limits, choice: fields of `PageLimits` and `RolloutChoice`.
    Raises: Refusal for a folder that is no run's, and a page that cannot be written.
    """
    from spmdrl.report.page.write import PAGE, PageLimits, RolloutChoice, RunPage

    if not runs:
        raise Refusal("name the output_dir of at least one run")
    for run in runs:
        _check_run(run)
    out = html or runs[0] / PAGE
    page = RunPage(
        runs, limits=PageLimits(*limits), choice=RolloutChoice(**choice), plan_of=cache(_plan_of)
    )
    with refusing(f"--html {out}: no page can be written there", OSError):
        if follow:
            _follow(page, out)
        left_out = page.write(out)
    hint = f"\n{left_out}; --limit-mib and --limit-s take more" if left_out else ""
    return f"wrote {out}{hint}"


def _check_run(folder: Path) -> None:
    """Raises: Refusal for a folder in which nothing is of a run."""
    from spmdrl.rollout.recordings import find_recorded

    if not any((folder / name).exists() for name in ("config.yaml", "metrics.jsonl")):
        find_recorded(folder)


def _follow(page: RunPage, out: Path) -> None:
    """Write the page every few seconds until the runs have done all steps, or Ctrl-C."""
    say(f"writing {out} every {_FOLLOW_S:g} s; Ctrl-C ends", flush=True)
    try:
        while True:
            page.write(out, reload_s=_FOLLOW_S)
            if page.is_done:
                return
            time.sleep(_FOLLOW_S)
    except KeyboardInterrupt:
        return


def _plan_of(folder: Path) -> dict[str, Any]:
    """Return the planned bytes of a run's rank by cause. Raises: Refusal if there is no plan."""
    from dataclasses import replace

    from spmdrl.config.files import load_yaml
    from spmdrl.model.load import build_meta_model
    from spmdrl.model.model_shape import with_known_shape
    from spmdrl.tools.plan.measured_run import read_run
    from spmdrl.tools.plan.run import rates_of, run_of_model
    from spmdrl.tools.plan.search import make_plan
    from spmdrl.tools.plan.text import as_dict
    from spmdrl.world.axes import axes_of

    cfg = with_known_shape(load_yaml(folder / "config.yaml"))
    measured = read_run(folder)
    rates = rates_of(measured.gpu or "H100")
    run = run_of_model(
        replace(cfg, layout=replace(cfg.layout, device="cuda" if measured.gpu else "cpu")),
        build_meta_model(cfg.model),
        prompt_tokens=measured.prompt_tokens,
        response_tokens=measured.response_tokens,
    )
    return as_dict(make_plan(run, axes_of(cfg), rates=rates), rates=rates)


main = partial(run_command, "view", view)
