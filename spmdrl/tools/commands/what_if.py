"""Try other losses, advantages and corrections on a run's recorded steps.

    python -m spmdrl what-if runs/mine --loss gspo cispo
    python -m spmdrl what-if runs/mine --steps 10 20 --loss ppo_clip gspo --correction none icepop
    python -m spmdrl what-if runs/mine --advantage my_credit.py:mine --html differ.html
    python -m spmdrl what-if runs/mine --alternative '{loss: cispo, loss_options: {clip_high: 4.0}}'

No engine is built and nothing of the run is changed; see docs/what_if.md.
"""

from __future__ import annotations

import signal
from json import dumps
from pathlib import Path
from typing import Annotated

import tyro

from spmdrl.errors import Refusal
from spmdrl.imports import refusing
from spmdrl.run_folder import write_file
from spmdrl.tools.commands import run_command


def what_if(
    run: Annotated[Path, tyro.conf.Positional],
    *,
    steps: tuple[int, ...] = (),
    loss: tuple[str, ...] = (),
    advantage: tuple[str, ...] = (),
    correction: tuple[str, ...] = (),
    alternative: tyro.conf.UseAppendAction[tuple[str, ...]] = (),
    limit: int = 5,
    json: bool = False,
    html: Path | None = None,
    tokenizer: str = "",
    trust_run: bool = False,
    trust_remote_code: bool = False,
) -> str:
    """Say what other losses, advantages and corrections would do with a run's recorded steps.

    Every combination of one --loss, one --advantage and one --correction is an alternative; what is
    not named stays as in the run.

    Args:
        run: output_dir of a run with recorded rollouts and checkpoints.
        steps: recorded steps, as in metrics.jsonl; by default the newest that can be evaluated.
        loss: losses, by name or as file.py:function.
        advantage: advantage estimators.
        correction: corrections.
        alternative: any fields of `algorithm` as a YAML mapping; may be repeated.
        limit: samples to show on which the alternatives differ most.
        json: print JSON, for programs.
        html: write a page of these samples, token by token.
        tokenizer: folder of the tokenizer, if not the run's.
        trust_run: run the functions that the run's config names.
        trust_remote_code: run Python code of the model's folder.
    Returns: what is to be printed.
    Raises: Refusal for what is not there or cannot be done right.
    """
    _check(limit, html)
    # Here: `--help` needs none of it.
    from spmdrl.tools.what_if.alternatives import alternatives
    from spmdrl.tools.what_if.page import page
    from spmdrl.tools.what_if.run import compare_alternatives, open_run, select_steps
    from spmdrl.tools.what_if.text import as_plain_data, table

    opened = open_run(run, trust_run=trust_run, trust_remote_code=trust_remote_code)
    chosen = alternatives(
        opened.cfg, losses=loss, advantages=advantage, corrections=correction, others=alternative
    )
    found = list(compare_alternatives(opened, select_steps(opened, steps), chosen))
    if html is not None:
        text = page(
            found,
            opened.recorded,
            limit=limit,
            tokenizer=tokenizer,
            trust_remote_code=trust_remote_code,
        )
        with refusing(f"--html {html}: no page can be written there", OSError):
            write_file(html, text.encode(errors="replace"))
    if json:
        return dumps({"run": str(run), "steps": [as_plain_data(one) for one in found]}, indent=1)
    lines = [table(one, limit=limit) for one in found]
    return "\n\n".join(lines + ([f"wrote {html}"] if html is not None else []))


def _check(limit: int, html: Path | None) -> None:
    if limit < 0:
        raise Refusal(f"--limit must be at least 0, got {limit}")
    if html is not None and not html.absolute().parent.is_dir():
        raise Refusal(f"--html {html}: there is no folder {html.absolute().parent}")


def main(argv: list[str] | None = None) -> int:
    """Print what the command line asks for and return the exit status: 2 for what is refused, 1 for
    an error, such as one of a function of the user's."""
    if argv is None:  # the program
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C during imports: no traceback
    try:
        return run_command("what_if", what_if, argv)
    except Exception as error:
        from spmdrl.world.leaving import report_end

        return report_end(error, None)  # the traceback from the user's own code on
