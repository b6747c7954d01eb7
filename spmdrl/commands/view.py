"""Look at recorded rollouts: a folder's steps, a step's groups, one group's responses.

    python -m spmdrl view runs/mine
    python -m spmdrl view runs/mine --step 12 --sort spread
    python -m spmdrl view runs/mine --step 12 --group 3 --tokens
    python -m spmdrl view runs/mine --step 12 --group 3 --html group.html
    python -m spmdrl view runs/mine --step 12 --html step.html

A run records them by rollout.record; see docs/rollouts.md.
"""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from spmdrl.errors import Refusal
from spmdrl.imports import attempt
from spmdrl.report.rollout_text import SORTS, group_text, groups_text, steps_text
from spmdrl.report.rollout_view import read_groups, summaries

if TYPE_CHECKING:
    from spmdrl.rollout.recordings import Recorded


def main(argv: list[str] | None = None) -> int:
    """Show what the command line asks for; return the exit status."""
    if argv is None:  # the program
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `... | head` ends without a word
    parser = argparse.ArgumentParser(
        prog="python -m spmdrl view",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description=__doc__,
    )
    parser.add_argument("folder", type=Path, help="output_dir of a run, or a folder of rollouts")
    parser.add_argument("--step", type=int, help="list its groups")
    parser.add_argument("--group", type=int, help="show its responses; needs --step")
    parser.add_argument(
        "--sort",
        choices=sorted(SORTS),
        default="",
        help="order of the groups, largest first; by number if left out",
    )
    parser.add_argument("--limit", type=int, default=40, help="groups to list (default: 40)")
    parser.add_argument("--tokens", action="store_true", help="token by token, with logprobs")
    parser.add_argument(
        "--html",
        type=Path,
        help="write the group, or all of the step, as a page with coloured tokens",
    )
    parser.add_argument(
        "--color",
        choices=("advantage", "logprob"),
        default="",
        help="of the page's tokens; advantage if it is known",
    )
    parser.add_argument("--tokenizer", default="", help="folder of the tokenizer, if not the run's")
    parser.add_argument(
        "--trust-remote-code", action="store_true", help="run Python code of the tokenizer's folder"
    )
    parser.add_argument(
        "--trust-run", action="store_true", help="run the advantage that the run's config names"
    )
    args = parser.parse_args(argv)
    if args.group is not None and args.step is None:
        parser.error("--group needs --step")
    if args.step is None and args.html:
        parser.error("--html shows a group, or all of a step: give --step")
    if args.group is None and args.tokens:
        parser.error("--tokens shows one group: give --step and --group")
    text, error = attempt(lambda: _shown(args), (Refusal, OSError))
    print(error or text, file=sys.stderr if error else sys.stdout)
    return 2 if error else 0


def _shown(args: argparse.Namespace) -> str:
    from spmdrl.rollout.recordings import find_recorded, reading

    recorded = find_recorded(args.folder)
    with reading(recorded.folder):
        text = _text(args, recorded)
    if args.html is None:
        return text
    args.html.write_text(text, encoding="utf-8", errors="replace")
    return f"wrote {args.html}"


def _text(args: argparse.Namespace, recorded: Recorded) -> str:
    if args.step is None:
        return steps_text(recorded)
    if args.group is None and args.html is None:
        return groups_text(summaries(recorded, args.step), sort=args.sort, limit=args.limit)
    views = read_groups(
        recorded,
        args.step,
        args.group,
        tokenizer=args.tokenizer,
        needs_text=args.tokens or args.html is not None,
        trust_remote_code=args.trust_remote_code,
        trust_run=args.trust_run,
    )
    if args.html is None:
        return group_text(views[0], tokens=args.tokens)
    from spmdrl.report.rollout_page import page

    return page(views, color=args.color)
