r"""Fetch a public set of problems, as JSONL files that a run trains on.

    python -m spmdrl fetch_problems gsm8k        # 7473 rows in data/gsm8k/train.jsonl, 1319 in test
    python -m spmdrl fetch_problems math         # 12000 and 500 (MATH-500) in data/math
    python -m spmdrl fetch_problems gpqa --source my_folder    # files that are here already

A row has the problem as a user's message that says where the answer belongs, and the answer in the
form that its reward reads: in \boxed{} for `spmdrl.rewards.graders:math`, plain for `hotpotqa`,
tests for `eurus_code`. `hotpotqa` also writes corpus.jsonl for the tool `search`, and `geometry3k`
a folder of images.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from spmdrl.errors import say
from spmdrl.run_folder import make_folder, write_file
from spmdrl.tools.commands import run_command

if TYPE_CHECKING:
    from spmdrl.tools.problem_sets import ProblemSet, Row, TakenRow

Name = Literal[
    "gsm8k",
    "math",
    "math_500",
    "aime_2024",
    "aime_2025",
    "dapo_math",
    "gpqa",
    "geometry3k",
    "hotpotqa",
    "eurus_code",
]


def fetch(
    set: Annotated[Name, tyro.conf.Positional],
    *,
    out: Path | None = None,
    source: Path | None = None,
) -> None:
    """Fetch a public set of problems, as JSONL files that a run trains on.

    Args:
        set: which one.
        out: folder; left out: data/SET.
        source: folder with the set's parquet or JSONL files as the hub has them; left out: the hub.
    """
    from spmdrl.tools.problem_sets import SETS

    problems = SETS[set]
    folder = out or Path("data") / set
    documents: dict[tuple[str, str], None] = {}
    for file, split in problems.splits.items():
        taken, left_out = _taken(problems, split, source=source)  # all, or no file
        folder.mkdir(parents=True, exist_ok=True)
        for one in taken:
            documents |= dict.fromkeys(one.documents)
            for path, data in one.images.items():
                make_folder((folder / path).parent, within=folder)
                write_file(folder / path, data, within=folder)
        rows = [{"data_source": problems.dataset, **one.row} for one in taken]
        _write_rows(folder / f"{file}.jsonl", rows, note=left_out)
    if documents:
        _write_rows(folder / "corpus.jsonl", ({"title": t, "text": x} for t, x in documents))


def _taken(problems: ProblemSet, split: str, *, source: Path | None) -> tuple[list[TakenRow], str]:
    """Return the rows of a split, and what was left out, for people."""
    from spmdrl.tools.problem_sets import read_rows

    found: list[TakenRow] = []
    index_of: dict[str, int] = {}
    repeated = 0
    disagreeing: set[int] = set()
    for row in read_rows(problems, split, folder=source):
        one = problems.take(row)
        if one is None:
            continue
        key = json.dumps(one.row["prompt"])
        if problems.repeats and key in index_of:
            repeated += 1
            if one.row["answer"] != found[index_of[key]].row["answer"]:
                disagreeing.add(index_of[key])
            continue
        index_of[key] = len(found)
        found.append(one)
    note = ""
    if repeated:
        note = f"; left out: {repeated} repetitions, {len(disagreeing)} problems of several answers"
    return [one for i, one in enumerate(found) if i not in disagreeing], note


def _write_rows(path: Path, rows: Iterable[Row | dict[str, Any]], *, note: str = "") -> None:
    lines = [json.dumps(row, ensure_ascii=False) for row in rows]
    write_file(path, "".join(f"{line}\n" for line in lines))
    say(f"{path}: {len(lines)} rows{note}")


main = partial(run_command, "fetch_problems", fetch)
