"""Public sets of problems as rows that a run trains on: where they lie, and how a row is read.

The columns are those that the sets have on the hub. A set that has other columns is refused.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from spmdrl.data.row_files import SUFFIXES, hub_rows, numbered_rows
from spmdrl.errors import Refusal

ASK = "Please reason step by step, and put your final answer within \\boxed{}."
"""What Qwen and DeepSeek recommend for problems of mathematics."""
ASK_LETTER = (
    "Please reason step by step, and put the letter of the right choice, and only that, within "
    "\\boxed{}."
)
ASK_TAG = (
    "Search for what you need to know. Put your final answer, and only that, between <answer> and "
    "</answer>."
)
_DAPO_BEFORE = (
    "Solve the following math problem step by step. The last line of your response should be of "
    "the form Answer: $Answer (without quotes) where $Answer is the answer to the problem.\n\n"
)
_DAPO_AFTER = '\n\nRemember to put your answer on its own line after "Answer:".'
_IMAGES = {b"\x89PNG": "png", b"\xff\xd8\xff": "jpg"}
"""{first bytes of a file: its suffix}"""

Row = dict[str, Any]


@dataclass(frozen=True)
class TakenRow:
    """What a row of a set becomes."""

    row: Row
    """As it is written, without `data_source`."""
    images: dict[str, bytes] = field(default_factory=dict)
    """{path relative to the folder: file} of its images."""
    documents: tuple[tuple[str, str], ...] = ()
    """(title, text) of what the tool `search` finds."""


@dataclass(frozen=True)
class ReadRow:
    """A row as the set has it."""

    columns: Row
    place: str
    """For messages."""
    name: str
    """Unique among the rows of the set, for names of files."""
    folder: Path | None = None
    """Where paths in it begin; None on the hub."""

    def text(self, column: str) -> str:
        """Return the text of a column; `a.b` is a field within column a.

        Raises: Refusal where there is none.
        """
        value: Any = self.columns
        for part in column.split("."):
            value = value.get(part) if isinstance(value, dict) else None
        if isinstance(value, int) and not isinstance(value, bool):
            value = str(value)
        if not isinstance(value, str) or not value.strip():
            raise self.refusal(f"no text in column {column!r}")
        return value.strip()

    def refusal(self, what: str) -> Refusal:
        """Return the refusal of this row."""
        return Refusal(
            f"{self.place}: {what}; the columns are {', '.join(self.columns)}; give a file of your "
            "own with `prompt` and `answer` (docs/data.md)"
        )


@dataclass(frozen=True)
class ProblemSet:
    """Where problems lie on the hub, and how a row of them is read."""

    dataset: str
    take: Callable[[ReadRow], TakenRow | None]
    """Returns None for a row that is left out."""
    splits: dict[str, str] = field(default_factory=lambda: {"train": "train", "test": "test"})
    """{file: its split on the hub}"""
    config: str = ""
    repeats: bool = False
    """Rows are there many times; one of each is taken."""


def read_rows(source: ProblemSet, split: str, *, folder: Path | None = None) -> Iterator[ReadRow]:
    """Yield the rows of a split.

    Args:
        split: its name on the hub.
        folder: of the set's parquet or JSONL files; None reads them from the hub.
    Raises: Refusal when they cannot be read.
    """
    if folder is None:
        spec = ":".join(filter(None, (source.dataset, source.config, split)))
        for number, (place, columns) in enumerate(hub_rows(spec)):
            yield ReadRow(columns, place, f"{split}_{number}")
        return
    number = 0
    for path in split_files(source, split, folder=folder):
        for place, columns in numbered_rows(str(path)):
            if not isinstance(columns, dict):
                raise Refusal(f"{place}: expected a row with columns")
            yield ReadRow(columns, place, f"{split}_{number}", folder=path.parent)
            number += 1


def split_files(source: ProblemSet, split: str, *, folder: Path) -> list[Path]:
    """Return the data files of a split in a folder, as the hub has them: `CONFIG/SPLIT-0.parquet`,
    `data/SPLIT-0.parquet` or `SPLIT.jsonl`. A set of one split may have files of any name.

    Raises: Refusal where there are none.
    """
    root = folder / source.config if source.config and (folder / source.config).is_dir() else folder
    files = sorted(path for path in root.rglob("*") if path.suffix in SUFFIXES and path.is_file())
    begin = re.compile(rf"{re.escape(split)}(?![A-Za-z])")
    own = [p for p in files if any(begin.match(part) for part in p.relative_to(root).parts)]
    if not own and len(source.splits) == 1:
        own = files
    if not own:
        raise Refusal(
            f"{root}: no file of the split {split!r} that ends in {', '.join(SUFFIXES)}; give the "
            f"folder with the files of {source.dataset}, as the hub has them"
        )
    return own


def final_answer(text: str) -> str:
    """Return in a box what follows GSM8K's ####, without separators; all of another answer."""
    _, mark, number = text.rpartition("####")
    return f"\\boxed{{{number.replace(',', '').strip() if mark else text.strip()}}}"


def _asked(problem: str, answer: str, *, ask: str = ASK) -> Row:
    return {
        "prompt": [{"role": "user", "content": f"{problem.strip()}\n\n{ask}"}],
        "answer": answer,
    }


def _problem(row: ReadRow, *, column: str = "problem") -> TakenRow:
    return TakenRow(_asked(row.text(column), final_answer(row.text("answer"))))


def _aime(row: ReadRow) -> TakenRow:
    answer = row.text("answer")
    if answer.isdigit():  # three digits, with zeros in front
        answer = str(int(answer))
    return TakenRow(_asked(row.text("problem"), final_answer(answer)))


def _dapo(row: ReadRow) -> TakenRow:
    """Take out what the paper asks in addition to the problem: the form of the answer."""
    messages = row.columns.get("prompt")
    if not isinstance(messages, list) or len(messages) != 1:
        raise row.refusal("no single message in column 'prompt'")
    content = str(messages[0].get("content", "")).strip()
    problem = content.removeprefix(_DAPO_BEFORE).removesuffix(_DAPO_AFTER)
    if not problem.strip():
        raise row.refusal("no text in column 'prompt'")
    return TakenRow(_asked(problem, final_answer(row.text("reward_model.ground_truth"))))


def _choices(row: ReadRow) -> TakenRow:
    """Show the choices in an order that is drawn by the question alone."""
    question = row.text("Question")
    right = row.text("Correct Answer")
    choices = [right, *(row.text(f"Incorrect Answer {i}") for i in (1, 2, 3))]
    random.Random(question).shuffle(choices)
    lines = [f"{letter}. {choice}" for letter, choice in zip("ABCD", choices)]
    answer = "ABCD"[choices.index(right)]
    problem = f"{question}\n\n" + "\n".join(lines)
    return TakenRow(_asked(problem, final_answer(answer), ask=ASK_LETTER))


def _geometry(row: ReadRow) -> TakenRow:
    found = row.columns.get("images")
    if not isinstance(found, list) or not found:
        raise row.refusal("no list in column 'images'")
    images = {}
    for number, image in enumerate(found):
        data = _image_bytes(image, row)
        suffix = next((s for begin, s in _IMAGES.items() if data.startswith(begin)), "")
        if not suffix:
            raise row.refusal(f"image {number} is neither PNG nor JPEG")
        images[f"images/{row.name}_{number}.{suffix}"] = data
    taken = _asked(row.text("problem"), final_answer(row.text("answer")))
    return TakenRow({**taken, "images": list(images)}, images=images)


def _image_bytes(image: Any, row: ReadRow) -> bytes:
    if isinstance(image, dict) and isinstance(image.get("bytes"), bytes):
        return image["bytes"]
    path = image.get("path") if isinstance(image, dict) else image
    if not isinstance(path, str) or row.folder is None:
        raise row.refusal("an image without bytes in column 'images'")
    file = (row.folder / path).resolve()
    if not file.is_relative_to(row.folder.resolve()) or not file.is_file():
        raise row.refusal(f"no image {path!r} in {row.folder}")
    return file.read_bytes()


def _question(row: ReadRow) -> TakenRow:
    context = row.columns.get("context")
    if not isinstance(context, dict) or not {"title", "sentences"} <= context.keys():
        raise row.refusal("no titles and sentences in column 'context'")
    texts = ("".join(sentences).strip() for sentences in context["sentences"])
    documents = tuple(zip(context["title"], texts, strict=True))
    return TakenRow(
        _asked(row.text("question"), row.text("answer"), ask=ASK_TAG), documents=documents
    )


def _program(row: ReadRow) -> TakenRow | None:
    """Take the problems that a program solves, without the set's own system prompt."""
    if row.columns.get("ability") != "code":
        return None
    messages = row.columns.get("prompt")
    users = [m for m in messages or () if isinstance(m, dict) and m.get("role") == "user"]
    if len(users) != 1:
        raise row.refusal("no single message of a user in column 'prompt'")
    prompt = [{"role": "user", "content": users[0]["content"]}]
    return TakenRow({"prompt": prompt, "answer": row.text("reward_model.ground_truth")})


SETS = {
    # arXiv 2110.14168
    "gsm8k": ProblemSet("openai/gsm8k", partial(_problem, column="question"), config="main"),
    # arXiv 2103.03874; the 500 test problems are those of arXiv 2305.20050.
    "math": ProblemSet("nlile/hendrycks-MATH-benchmark", _problem, config="default"),
    "math_500": ProblemSet("HuggingFaceH4/MATH-500", _problem, splits={"test": "test"}),
    "aime_2024": ProblemSet("HuggingFaceH4/aime_2024", _aime, splits={"test": "train"}),
    "aime_2025": ProblemSet("math-ai/aime25", _aime, splits={"test": "test"}),
    # arXiv 2503.14476; its 1.79 million rows are 17 thousand problems.
    "dapo_math": ProblemSet(
        "BytedTsinghua-SIA/DAPO-Math-17k", _dapo, splits={"train": "train"}, repeats=True
    ),
    # arXiv 2311.12022
    "gpqa": ProblemSet(
        "Idavidrein/gpqa", _choices, splits={"test": "train"}, config="gpqa_diamond"
    ),
    "geometry3k": ProblemSet("hiyouga/geometry3k", _geometry),  # arXiv 2105.04165
    # arXiv 1809.09600
    "hotpotqa": ProblemSet(
        "hotpotqa/hotpot_qa",
        _question,
        splits={"train": "train", "test": "validation"},
        config="distractor",
    ),
    # arXiv 2502.01456
    "eurus_code": ProblemSet(
        "PRIME-RL/Eurus-2-RL-Data", _program, splits={"train": "train", "test": "validation"}
    ),
}
