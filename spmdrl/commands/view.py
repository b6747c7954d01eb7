"""Look at recorded rollouts: a folder's steps, a step's groups, one group's responses.

    python -m spmdrl view runs/mine
    python -m spmdrl view runs/mine --step 12 --sort spread
    python -m spmdrl view runs/mine --step 12 --group 3 --tokens
    python -m spmdrl view runs/mine --step 12 --group 3 --html group.html

A run records them by rollout.record; see docs/rollouts.md.
"""

from __future__ import annotations

import argparse
import math
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spmdrl.config import Config
from spmdrl.config.read import load_yaml

if TYPE_CHECKING:
    import pyarrow

    from spmdrl.rollout.recordings import Recorded

_SORTS: dict[str, Callable[[Summary], float]] = {
    "reward": lambda group: -group.mean,
    "length": lambda group: -group.length,
    "spread": lambda group: -group.spread,
}


@dataclass(frozen=True)
class Answer:
    """One recorded response, greedy or drawn."""

    row: dict[str, Any]
    """Its columns, those per token too."""
    advantage: float | None
    """None where it is not known, or the response is the greedy one."""
    pieces: list[str] | None
    """Text of each token; None without a tokenizer."""

    @property
    def start(self) -> int:
        """Return the position of the first token after the prompt."""
        mask = self.row["response_mask"]
        return mask.index(True) if True in mask else len(mask)


@dataclass(frozen=True)
class View:
    """One group, as it is shown."""

    step: int
    group: int
    header: dict[str, Any]
    sequences: list[Answer]
    notes: list[str]
    """What is not known, and why."""


@dataclass(frozen=True)
class Summary:
    """One group in a list."""

    group: int
    row: int
    samples: int
    mean: float
    """Of the rewards that did not fail, task units; NaN where all did."""
    spread: float
    """Their standard deviation, population form."""
    length: float
    """Mean sampled tokens."""
    truncated: int
    prompt: str


# --------------------------------------------------------------------------- reading


def config_of(recorded: Recorded) -> tuple[Config | None, str]:
    """Return the config of the run that recorded, or None and why it is not known."""
    path = recorded.folder.resolve().parent / "config.yaml"
    try:
        return load_yaml(path, may_be_former=True), ""
    except ValueError as error:  # not there, or of another version of this program
        return None, str(error)


def summaries(recorded: Recorded, step: int) -> list[Summary]:
    """Return the groups of a step, by number. Raises: ValueError for a step that is not there."""
    table = _sequences(recorded, step)
    groups: dict[int, list[dict[str, Any]]] = {}
    for row in table.to_pylist():
        groups.setdefault(row["group"], []).append(row)
    found = []
    for number in sorted(groups):
        rows = groups[number]
        rewards = [row["reward"] for row in rows if row["is_valid"]]
        mean = math.fsum(rewards) / len(rewards) if rewards else math.nan
        square = math.fsum((r - mean) ** 2 for r in rewards) / max(1, len(rewards))
        found.append(
            Summary(
                number,
                rows[0]["row"],
                len(rows),
                mean,
                math.sqrt(square),
                sum(row["response_length"] for row in rows) / len(rows),
                sum(row["is_truncated"] for row in rows),
                rows[0]["prompt"],
            )
        )
    return found


def _sequences(recorded: Recorded, step: int) -> pyarrow.Table:
    """Return the drawn sequences of a step, without what is per token, sorted as a batch is."""
    import pyarrow
    import pyarrow.compute

    from spmdrl.rollout.episode import GREEDY
    from spmdrl.rollout.recorder import SEQUENCE_COLUMNS
    from spmdrl.rollout.recordings import read_table

    table = pyarrow.concat_tables(
        [read_table(path, columns=SEQUENCE_COLUMNS) for path in recorded.files_of(step)]
    )
    table = table.filter(pyarrow.compute.field("sample") != GREEDY)
    return table.sort_by([("group", "ascending"), ("sample", "ascending")])


def advantages(
    recorded: Recorded, step: int, cfg: Config
) -> tuple[dict[tuple[int, int], float], str]:
    """Recompute a step's advantages where they are one number per sequence.

    Returns: {(group, sample): advantage}, and why it is empty if it is.
    """
    import torch

    from spmdrl.algorithms import registry
    from spmdrl.credit import sequence_advantages
    from spmdrl.rollout.recordings import read_header, scalars_of
    from spmdrl.types import Batch

    chosen = cfg.algorithm
    if read_header(recorded.files_of(step)[0])["is_partial"]:
        return {}, "the part of reward models, which trainers add, is not recorded"
    try:
        method = registry.get("advantage", chosen.advantage)
        if registry.is_per_token(method):
            return {}, f"{chosen.advantage} gives each token its own, and they are not recorded"
        if chosen.kl_coef and chosen.kl_in == "reward":
            return {}, "the KL in the rewards, which trainers add, is not recorded"
        scalars = scalars_of(_sequences(recorded, step))
        values = sequence_advantages(
            Batch(scalars, updates=(), update_ids=torch.zeros(len(scalars), dtype=torch.int64)), cfg
        )
    except ValueError as error:
        return {}, str(error)
    places = zip(scalars.group_ids.tolist(), scalars.sample_ids.tolist())
    return dict(zip(places, values.tolist())), ""


def read_group(
    recorded: Recorded, step: int, group: int, *, tokenizer: str = "", needs_text: bool = False
) -> View:
    """Return one group with all that is known of it.

    Args:
        tokenizer: folder or hub name; empty takes the run's own.
        needs_text: of single tokens, which takes the tokenizer.
    Raises: ValueError for a step or group that is not there, naming those that are.
    """
    from spmdrl.rollout.recordings import ranges, read_header, read_table

    files = recorded.files_of(step)
    rows = [row for path in files for row in read_table(path, group=group).to_pylist()]
    if not rows:
        known = {one.group for one in summaries(recorded, step)}
        raise ValueError(
            f"step {step} of {recorded.folder} has no group {group}; it has groups {ranges(known)}"
        )
    cfg, reason = config_of(recorded)
    known, reason = advantages(recorded, step, cfg) if cfg else ({}, reason)
    notes = [f"advantages are not available: {reason}"] if reason else []
    header = read_header(files[0])
    if header["is_partial"]:
        notes.append("rewards are without the part of reward models, and not shaped")
    decode, problem = _decoder(cfg, tokenizer) if needs_text else (None, "")
    notes += [f"tokens are shown as ids: {problem}"] if problem else []
    rows.sort(key=lambda row: row["sample"])
    return View(
        step,
        group,
        header,
        notes=notes,
        sequences=[
            Answer(
                row,
                known.get((group, row["sample"])),
                [decode(token) for token in row["tokens"]] if decode else None,
            )
            for row in rows
        ],
    )


def _decoder(cfg: Config | None, name: str) -> tuple[Callable[[int], str] | None, str]:
    """Return what gives the text of a token id, or why there is nothing that does."""
    from transformers import AutoTokenizer

    name = name or (cfg.model.tokenizer or cfg.model.path if cfg else "")
    if not name:
        return None, "there is no config, which names the tokenizer; give --tokenizer"
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            name,
            local_files_only=True,
            trust_remote_code=cfg is not None and cfg.model.trust_remote_code,
        )
    except (OSError, ValueError, KeyError):
        return None, f"no tokenizer can be loaded from {name!r}; give another by --tokenizer"
    return lambda token: tokenizer.decode([token]), ""


# --------------------------------------------------------------------------- text


def steps_text(recorded: Recorded) -> str:
    """Return the steps of a folder, one line each."""
    lines = [f"{recorded.folder}", f"{'step':>8}  {'files':>5}  {'MB':>8}  {'reward':>8}"]
    for step, files in recorded.steps.items():
        groups = summaries(recorded, step)
        means = [one.mean for one in groups if not math.isnan(one.mean)]
        mean = math.fsum(means) / len(means) if means else math.nan
        size = sum(path.stat().st_size for path in files) / 1e6
        lines.append(f"{step:>8}  {len(files):>5}  {size:>8.3f}  {mean:>8.3f}")
    return "\n".join([*lines, "--step N lists the groups of a step"])


def groups_text(found: Sequence[Summary], *, sort: str, limit: int) -> str:
    """Return a step's groups, one line each, sorted by `sort` (largest first) or number."""
    order = sorted(found, key=_SORTS[sort]) if sort else list(found)
    lines = [
        f"{'group':>6} {'row':>8} {'samples':>8} {'reward':>8} {'spread':>8} {'length':>8} "
        f"{'cut':>4}  prompt"
    ]
    for one in order[:limit]:
        prompt = " ".join(one.prompt.split())
        lines.append(
            f"{one.group:>6} {one.row:>8} {one.samples:>8} {one.mean:>8.3f} "
            f"{one.spread:>8.3f} {one.length:>8.1f} {one.truncated:>4}  {prompt[:40]}"
        )
    if len(order) > limit:
        lines.append(f"... {len(order) - limit} more: --limit {len(order)}")
    return "\n".join([*lines, "--group N shows one"])


def group_text(view: View, *, tokens: bool) -> str:
    """Return a group with its responses, and token by token if `tokens`."""
    first = view.sequences[0].row
    lines = [
        f"step {view.step}, group {view.group}, data row {first['row']}",
        *(f"note: {note}" for note in view.notes),
        "prompt:",
        _indented(first["prompt"]),
    ]
    for sequence in view.sequences:
        lines += [title(sequence, view.header["part_names"]), _indented(sequence.row["response"])]
        if tokens:
            lines += _token_lines(sequence)
    return "\n".join(lines)


def title(sequence: Answer, names: Sequence[str]) -> str:
    """Return the line of numbers above a response."""
    row = sequence.row
    words = ["greedy" if row["sample"] < 0 else f"sample {row['sample']}"]
    words.append(
        f"reward {row['reward']:.4g}" if row["is_valid"] else f"reward failed ({row['failure']})"
    )
    raw = row["raw_reward"]
    if raw is not None and raw != row["reward"]:
        words.append(f"before shaping {raw:.4g}")
    if len(names) > 1 and row["sample"] >= 0:
        words += [f"{name} {value:.4g}" for name, value in zip(names, row["reward_parts"])]
    if sequence.advantage is not None:
        words.append(f"advantage {sequence.advantage:.4g}")
    words.append(f"{row['response_length']} tokens" + (", cut" if row["is_truncated"] else ""))
    if row["turns"] > 1:
        words.append(f"{row['turns']} turns")
    return ", ".join(words)


def _token_lines(sequence: Answer) -> list[str]:
    row = sequence.row
    lines = [f"    {'at':>5} {'id':>7} {'logprob':>9} {'version':>7}  token"]
    for at in range(sequence.start, len(row["tokens"])):
        piece = repr(sequence.pieces[at]) if sequence.pieces else ""
        token = f"    {at:>5} {row['tokens'][at]:>7}"
        lines.append(
            f"{token} {row['rollout_logprobs'][at]:>9.4f} {row['policy_versions'][at]:>7}  {piece}"
            if row["response_mask"][at]
            else f"{token} {'-':>9} {'-':>7}  {piece} (not sampled)"
        )
    return lines


def _indented(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.splitlines() or [""])


# --------------------------------------------------------------------------- the command


def main(argv: list[str] | None = None) -> int:
    """Show what the command line asks for; return the exit status."""
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
        choices=sorted(_SORTS),
        default="",
        help="order of the groups, largest first; by number if left out",
    )
    parser.add_argument("--limit", type=int, default=40, help="groups to list (default: 40)")
    parser.add_argument("--tokens", action="store_true", help="token by token, with logprobs")
    parser.add_argument("--html", type=Path, help="write the group as a page with coloured tokens")
    parser.add_argument(
        "--color",
        choices=("advantage", "logprob"),
        default="",
        help="of the page's tokens; advantage if it is known",
    )
    parser.add_argument("--tokenizer", default="", help="folder of the tokenizer, if not the run's")
    args = parser.parse_args(argv)
    if args.group is not None and args.step is None:
        parser.error("--group needs --step")
    if args.group is None and (args.html or args.tokens):
        parser.error("--html and --tokens show one group: give --step and --group")
    try:
        print(_shown(args))
    except (ValueError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def _shown(args: argparse.Namespace) -> str:
    from spmdrl.rollout.recordings import find_recorded

    recorded = find_recorded(args.folder)
    if args.step is None:
        return steps_text(recorded)
    if args.group is None:
        return groups_text(summaries(recorded, args.step), sort=args.sort, limit=args.limit)
    view = read_group(
        recorded,
        args.step,
        args.group,
        tokenizer=args.tokenizer,
        needs_text=args.tokens or args.html is not None,
    )
    if args.html is None:
        return group_text(view, tokens=args.tokens)
    from spmdrl.report.rollout_page import page

    args.html.write_text(page(view, color=args.color), encoding="utf-8")
    return f"wrote {args.html}"


if __name__ == "__main__":
    sys.exit(main())
