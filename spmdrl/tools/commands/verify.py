"""Take certified steps of a run again, without an engine, and compare the numbers.

    python -m spmdrl verify runs/mine
    python -m spmdrl verify runs/mine --steps 10 20
    torchrun --standalone --nproc-per-node 4 -m spmdrl verify runs/mine     # of a run of 4 trainers

A step is reached from the newest checkpoint before it, or from the weights that the run began with,
over recorded rollouts (rollout.record.every), without an engine and without rewards. Exit status: 0
it repeats, bit for bit, or on another machine but for rounding; 1 it does not; 2 it cannot be done.
"""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Annotated

import tyro

from spmdrl.errors import say
from spmdrl.tools.commands import typed


def verify(
    run: Annotated[Path, tyro.conf.Positional],
    *,
    steps: tuple[int, ...] = (),
    rounding: float | None = None,
    trust_run: bool = False,
    trust_remote_code: bool = False,
) -> tuple[str, bool]:
    """Take certified steps of a run again, and compare them with its certificate.

    Args:
        run: its output_dir.
        steps: to take again; by default all that can be reached.
        rounding: on another machine, the deviation of a tensor, as a share of its norm, that other
            kernels explain; by default by model.compute_dtype.
        trust_run: run the methods of the user's own that the run's config names.
        trust_remote_code: run Python code of the model's folder.
    Returns: the text to print, and whether the steps repeat.
    Raises: Refusal for what is not there, was changed, or is of another run, layout or model.
    """
    from spmdrl.certificate.lines import read
    from spmdrl.tools.certificates.replay import plan_ways, replay_steps
    from spmdrl.tools.certificates.report import compare_runs
    from spmdrl.tools.foreign_code import trusted_config
    from spmdrl.tools.recorded_run import RecordedRun
    from spmdrl.world.launch import launch_alone

    certificate = read(run)
    cfg = trusted_config(run, trust_run=trust_run, trust_remote_code=trust_remote_code)
    recorded = RecordedRun.open(run, cfg)
    ways = plan_ways(certificate, recorded, requested=steps)
    launch_alone()
    again = compare_runs(certificate, replay_steps(certificate, recorded, ways), rounding=rounding)
    left = sorted({*certificate.steps} - {way.step for way in ways}) if not steps else []
    lines = [again.text()]
    if left:
        lines.append(f"not taken again, for want of a checkpoint or recordings: steps {left}")
    return "\n".join(lines), again.are_equal


def main() -> None:
    """Do what the command line says, and end this process."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C during imports: no traceback
    try:
        text, repeats = tyro.cli(verify, prog=typed("verify"))
    except Exception as error:
        from spmdrl.world.leaving import end_process, report_end  # here: it comes with torch

        end_process(report_end(error, None))  # says why, here and to the other ranks
    from spmdrl.world.launch import known_rank
    from spmdrl.world.leaving import end_process

    if known_rank() == "0":
        say(text)
    end_process(0 if repeats else 1)
