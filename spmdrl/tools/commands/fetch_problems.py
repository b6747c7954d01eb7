r"""Fetch GSM8K or MATH from the hub, as JSONL files that a run trains on.

    python -m spmdrl fetch_problems gsm8k        # 7473 rows in data/gsm8k/train.jsonl, 1319 in test
    python -m spmdrl fetch_problems math         # 12000 and 500 (MATH-500) in data/math

A row has the problem as a user's message that asks for the answer in \boxed{}, and the answer in
\boxed{} too, so that `spmdrl.rewards.graders:math` reads all of it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from spmdrl.data.row_files import hub_rows
from spmdrl.errors import Refusal, say
from spmdrl.run_folder import write_file
from spmdrl.tools.commands import run_command

ASK = "Please reason step by step, and put your final answer within \\boxed{}."
"""What Qwen and DeepSeek recommend for problems of mathematics."""


@dataclass(frozen=True)
class ProblemSet:
    """Where problems lie on the hub."""

    dataset: str
    config: str  # before the split, with its colon
    problem: str  # column


SETS = {
    "gsm8k": ProblemSet("openai/gsm8k", "main:", "question"),  # arXiv 2110.14168
    # arXiv 2103.03874; the 500 test problems are those of arXiv 2305.20050.
    "math": ProblemSet("nlile/hendrycks-MATH-benchmark", "default:", "problem"),
}


def rows_of(source: ProblemSet, *, split: str) -> Iterator[dict[str, Any]]:
    """Yield the rows of one split as they are written.

    Raises: Refusal when the dataset cannot be read, or has other columns than it had.
    """
    for place, row in hub_rows(f"{source.dataset}:{source.config}{split}"):
        for column in (source.problem, "answer"):
            if not isinstance(row.get(column), str) or not row[column].strip():
                raise Refusal(
                    f"{place}: no text in column {column!r}; the columns are {', '.join(row)}; "
                    "give a file of your own with `prompt` and `answer` (docs/data.md)"
                )
        yield {
            "data_source": source.dataset,
            "prompt": [{"role": "user", "content": f"{row[source.problem].strip()}\n\n{ASK}"}],
            "answer": final_answer(row["answer"]),
        }


def final_answer(text: str) -> str:
    """Return in a box what follows GSM8K's ####, without separators; all of another answer."""
    _, mark, number = text.rpartition("####")
    return f"\\boxed{{{number.replace(',', '').strip() if mark else text.strip()}}}"


def fetch(
    set: Annotated[Literal["gsm8k", "math"], tyro.conf.Positional], *, out: Path | None = None
) -> None:
    """Fetch GSM8K or MATH from the hub, as JSONL files that a run trains on.

    Args:
        set: which one.
        out: folder; left out: data/SET.
    """
    folder = out or Path("data") / set
    for split in ("train", "test"):
        rows = list(rows_of(SETS[set], split=split))  # all, or no file
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{split}.jsonl"
        lines = (json.dumps(row, ensure_ascii=False) for row in rows)
        write_file(path, "".join(f"{line}\n" for line in lines))
        say(f"{path}: {len(rows)} rows")


main = partial(run_command, "fetch_problems", fetch)
