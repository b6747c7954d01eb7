"""Look at recorded rollouts: a folder's steps, a step's groups, one group's responses.

    python -m spmdrl view runs/mine
    python -m spmdrl view runs/mine --step 12 --sort spread
    python -m spmdrl view runs/mine --step 12 --group 3 --tokens
    python -m spmdrl view runs/mine --step 12 --group 3 --html group.html
    python -m spmdrl view runs/mine --step 12 --html step.html

A run records them by rollout.record; see docs/rollouts.md.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import tyro

from spmdrl.errors import Refusal
from spmdrl.imports import refusing
from spmdrl.run_folder import write_file
from spmdrl.tools.commands import run_command
from spmdrl.tools.rollouts.html import page
from spmdrl.tools.rollouts.terminal import group_text, groups_text, steps_text
from spmdrl.tools.rollouts.view import read_groups, summaries


def view(
    folder: Annotated[Path, tyro.conf.Positional],
    *,
    step: int | None = None,
    group: int | None = None,
    sort: Literal["", "length", "reward", "spread"] = "",
    limit: int = 40,
    tokens: bool = False,
    html: Path | None = None,
    color: Literal["", "advantage", "logprob"] = "",
    tokenizer: str = "",
    trust_remote_code: bool = False,
    trust_run: bool = False,
) -> str:
    """Look at recorded rollouts: a folder's steps, a step's groups, one group's responses.

    Args:
        folder: output_dir of a run, or a folder of rollouts.
        step: list its groups.
        group: show its responses; needs --step.
        sort: order of the groups, largest first; by number if left out.
        limit: groups to list.
        tokens: token by token, with logprobs.
        html: write the group, or all of the step, as a page with coloured tokens.
        color: of the page's tokens; advantage if it is known.
        tokenizer: folder of the tokenizer, if not the run's.
        trust_remote_code: run Python code of the tokenizer's folder.
        trust_run: run the advantage that the run's config names.
    Returns: the text to print.
    Raises: Refusal for a folder, step or group that does not exist.
    """
    from spmdrl.rollout.recordings import find_recorded, reading

    for flag, asked, needs, given in (
        ("--group", group is not None, "--step", step is not None),
        ("--html", html is not None, "--step", step is not None),
        ("--tokens", tokens, "--step and --group", group is not None),
    ):
        if asked and not given:
            raise Refusal(f"{flag} needs {needs}")
    recorded = find_recorded(folder)
    with reading(recorded.folder):
        if step is None:
            return steps_text(recorded)
        if group is None and html is None:
            return groups_text(summaries(recorded, step), sort=sort, limit=limit)
        views = read_groups(
            recorded,
            step,
            group,
            tokenizer=tokenizer,
            needs_text=tokens or html is not None,
            trust_remote_code=trust_remote_code,
            trust_run=trust_run,
        )
        text = page(views, color=color) if html else group_text(views[0], tokens=tokens)
    if html is None:
        return text
    with refusing(f"--html {html}: no page can be written there", OSError):
        write_file(html, text.encode(errors="replace"))
    return f"wrote {html}"


main = partial(run_command, "view", view)
