"""Generated problems and their graders: `task:NAME` (ours) and `reasoning_gym:NAME`.

A problem is a function of (seed, split, index) alone. The problem itself decides its split, and one
in five is held out. So no training run sees a problem of an evaluation, whatever its seed, size or
objective.
"""

from __future__ import annotations

import functools
import importlib.util
import random
import string
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from spmdrl.data.attachments import Shapes
from spmdrl.data.hashed import hashed, split_of
from spmdrl.errors import Refusal
from spmdrl.imports import nearest, refusing

if TYPE_CHECKING:  # reward workers import this module and need no settings
    from spmdrl.config.data import Split

_PREFIXES = ("task:", "reasoning_gym:")
_TRIES = 256  # a split that has problems stays empty with a probability of 0.8 ** 256


class Task(Protocol):
    """A generator of problems and the grader of their answers."""

    def row(self, seed: int, index: int, *, split: Split) -> dict:
        """Return problem `index` as a row with `prompt`, `answer` and `data_source`."""

    def score_answer(self, answer: str, entry: dict) -> float:
        """Return the reward of a response to a row made by `row`."""


def is_generated(spec: str) -> bool:
    """Return whether a data spec names a generated task."""
    return spec.startswith(_PREFIXES)


def unknown_task(spec: str) -> str:
    """Return that a task of ours is unknown, with the nearest name; empty for any other spec."""
    prefix, _, name = spec.partition(":")
    if prefix != "task" or name in _TASKS:
        return ""
    return f"{spec}: unknown task{nearest(name, list(_TASKS))}"


def make_task(spec: str, options: dict[str, Any], *, size: int = 1) -> Task:
    """Make the task that a data spec names.

    Args:
        spec: `task:addition`, or `reasoning_gym:NAME` of that package's datasets.
        options: keyword options of the task.
        size: number of problems; graders do not need it.
    Raises: Refusal for an unknown task or option, naming the nearest known one.
    """
    prefix, name = spec.split(":", 1)
    if prefix == "reasoning_gym":
        return ReasoningGym(name, options, size=size)
    if problem := unknown_task(spec):
        raise Refusal(problem)
    known = {own.name: str(own.type) for own in fields(_TASKS[name])}
    for option, value in options.items():
        if option not in known:
            raise Refusal(
                f"data.task_options.{option}: {spec} has no such option"
                f"{nearest(option, list(known))}"
            )
        if type(value).__name__ != known[option]:
            raise Refusal(f"data.task_options.{option}: expected {known[option]}, got {value!r}")
    return _TASKS[name](**options)


@dataclass(kw_only=True)
class Addition:
    """Sums of numbers, `123+456=` with answer `579`, and differences if asked for.

    Options:
        digits: of each number.
        terms: how many numbers are added.
        subtraction: make half of the problems differences, which are never negative.
        partial: reward the share of right digits, counted from the right; by default the reward is
            1 for the exact answer, else 0.
        mistakes: share of training rows whose demonstration (`completion`, for supervised training)
            is one too high while `answer` stays right, so that rewards can improve on it.
        slips: if above 0, share of the digits of those rows that are each one too high (0 for 9),
            instead of the whole number.
    """

    digits: int = 3
    terms: int = 2
    subtraction: bool = False
    partial: bool = False
    mistakes: float = 0.0
    slips: float = 0.0

    def __post_init__(self) -> None:
        for name, share in (("mistakes", self.mistakes), ("slips", self.slips)):
            if not 0.0 <= share <= 1.0:
                raise Refusal(f"data.task_options.{name}: must be a share from 0 to 1, got {share}")
        if self.slips and not self.mistakes:
            raise Refusal(
                f"data.task_options.slips: is {self.slips}, and mistakes is 0, so that no row has "
                "any; set mistakes to the share of rows that have them"
            )
        if not 2 <= self.terms <= 100 or (self.subtraction and self.terms > 2):
            raise Refusal(
                "data.task_options.terms: must be from 2 to 100, and 2 with subtraction, got "
                f"{self.terms}"
            )
        if not 1 <= self.digits <= 100:
            raise Refusal(f"data.task_options.digits: must be from 1 to 100, got {self.digits}")

    def row(self, seed: int, index: int, *, split: Split) -> dict:
        """Return problem `index`; see the class."""
        draw = random.Random(f"{seed}/{split}/{index}")
        low = 10 ** (self.digits - 1) if self.digits > 1 else 0
        for _ in range(_TRIES):
            numbers = [draw.randrange(low, 10**self.digits) for _ in range(self.terms)]
            sign = draw.choice("+-") if self.subtraction else "+"
            # 2+3 and 3+2 are one problem: both go to one split.
            if split_of(sign.join(map(str, sorted(numbers)))) == split:
                break
        if sign == "-":
            small, large = sorted(numbers)
            row = self._row(f"{large}-{small}=", large - small)
        else:
            row = self._row("+".join(map(str, numbers)) + "=", sum(numbers))
        if self.mistakes and split == "train" and draw.random() < self.mistakes:
            row["completion"] = self._mistaken(row["answer"], draw)
        return row

    def _mistaken(self, answer: str, draw: random.Random) -> str:
        """Return the answer plus one; with `slips`, raise each digit by one with that chance."""
        if not self.slips:
            return str(int(answer) + 1)
        wrong = ""
        for digit in answer:
            has_slipped = draw.random() < self.slips
            wrong += str((int(digit) + has_slipped) % 10)
        return wrong

    def _row(self, prompt: str, answer: int) -> dict:
        return {"prompt": prompt, "answer": str(answer), "data_source": "task:addition"}

    def score_answer(self, answer: str, entry: dict) -> float:
        """Return 1.0 for the exact answer, else 0.0, or the share of right digits."""
        answer = answer.strip()
        right = entry["answer"]
        if answer == right or not self.partial:
            return float(answer == right)
        same = sum(a == b for a, b in zip(reversed(answer), reversed(right)))
        return same / max(len(answer), len(right))


@dataclass(kw_only=True)
class AdditionPairs(Addition):
    """Addition with answers to compare: `chosen` is right, `rejected` is wrong in one digit.

    It is for preference losses and reward models. For losses on single responses, `completion` is
    one of the two at random, and `label` says whether it is the right one. The options are those of
    Addition, except `slips`; `mistakes` is the share of rows whose `rejected` is one too high
    instead.
    """

    slips: ClassVar[float] = 0.0  # type: ignore[misc]  # no option

    def row(self, seed: int, index: int, *, split: Split) -> dict:
        """Return problem `index`; see the class."""
        row = super().row(seed, index, split=split)
        draw = random.Random(f"pair/{seed}/{split}/{index}")
        chosen = row["answer"]
        rejected = str(int(chosen) + 1)
        if draw.random() >= self.mistakes:
            at = draw.randrange(len(chosen))
            # A longer number does not begin with 0.
            digits = "123456789" if at == 0 and len(chosen) > 1 else "0123456789"
            other = draw.choice(digits.replace(chosen[at], ""))
            rejected = chosen[:at] + other + chosen[at + 1 :]
        label = draw.random() < 0.5
        return row | {
            "chosen": chosen,
            "rejected": rejected,
            "label": label,
            "completion": chosen if label else rejected,
            "data_source": "task:addition_pairs",
        }


@dataclass(kw_only=True)
class GuessNumberTask:
    """Secrets for the game of environments.guess_number. Without that environment the policy has no
    hints.

    Options:
        low, high: smallest and largest secret.
        prompt: the question, which may hold `{low}` and `{high}`.
        held_out: by default evaluations have secrets of their own. In a small range, a policy that
            trains for long learns never to guess those. With false, evaluations draw from all
            secrets; before the first hint the policy knows nothing of a secret anyway.
    """

    low: int = 1
    high: int = 100
    held_out: bool = True
    prompt: str = "Guess my number from {low} to {high}."

    def __post_init__(self) -> None:
        low = self.low
        high = self.high
        prompt = self.prompt
        if high - low < 4:
            raise Refusal(
                "data.task_options.high: must be at least low + 4, so that some "
                f"secrets can be held out, got {low} and {high}"
            )
        what = f"data.task_options.prompt: {prompt!r} may hold {{low}} and {{high}} only"
        with refusing(what, ValueError, names_kind=True):
            for _, name, form, conversion in string.Formatter().parse(prompt):
                # A format with a large width would fill the memory.
                if name not in (None, "low", "high") or form or conversion:
                    raise ValueError(f"{name!r:.60} with form {form!r:.60}")
            self.prompt = prompt.format(low=low, high=high)

    def row(self, seed: int, index: int, *, split: Split) -> dict:
        """Return problem `index`; see the class."""
        draw = random.Random(f"{seed}/{split}/{index}")
        for _ in range(_TRIES):
            secret = draw.randint(self.low, self.high)
            if not self.held_out or split_of(str(secret)) == split:
                break
        return {"prompt": self.prompt, "answer": str(secret), "data_source": "task:guess_number"}

    def score_answer(self, answer: str, entry: dict) -> float:
        """Return 1.0 for the secret, else 0.0."""
        return float(answer.strip() == entry["answer"])


class ReasoningGym:
    """A dataset of the reasoning-gym package, with that dataset's own grader."""

    def __init__(self, name: str, options: dict[str, Any], *, size: int):
        if importlib.util.find_spec("reasoning_gym") is None:
            raise Refusal(f"reasoning_gym:{name} needs `pip install reasoning-gym`")
        from reasoning_gym.factory import DATASETS

        if name not in DATASETS:
            raise Refusal(f"reasoning_gym:{name}: unknown dataset{nearest(name, sorted(DATASETS))}")
        self.name = name
        self.options = options
        self.size = size
        self._block = functools.cache(self._make_block)

    def row(self, seed: int, index: int, *, split: Split) -> dict:
        """Return problem `index`: the first of its candidates in `split`.

        Raises: Refusal when there is none, because the dataset has too few problems.
        """
        for number in range(_TRIES):
            entry = self._block(seed, split, number)[index]
            if split_of(entry["question"]) == split:
                return {
                    "prompt": entry["question"],
                    "answer": entry["answer"],
                    "data_source": f"reasoning_gym:{self.name}",
                    "entry": entry,
                }
        raise Refusal(
            f"reasoning_gym:{self.name}: no {split} problem among {_TRIES} "
            "candidates; the dataset has too few problems to hold some out"
        )

    def score_answer(self, answer: str, entry: dict) -> float:
        """Return the dataset's own score of a response to a row made by `row`."""
        # Every block of the dataset has the same grader.
        return self._block(0, "train", 0).score_answer(answer, entry["entry"])

    def _make_block(self, seed: int, split: Split, number: int) -> Any:
        """Return a dataset with one candidate for each problem."""
        import reasoning_gym

        # Datasets draw problem i from seed + i, so that close seeds give the same problems,
        # shifted. Some need seed + i below 2 ** 32.
        block_seed = hashed(f"{seed}/{split}/{number}", num_bytes=4) >> 2
        what = (
            f"data.task_options {self.options} of reasoning_gym:{self.name} "
            f"with {self.size} problems"
        )
        with refusing(what, TypeError, ValueError, AssertionError):
            return reasoning_gym.create_dataset(
                self.name, seed=block_seed, size=self.size, **self.options
            )


_TASKS: dict[str, type[Addition | GuessNumberTask | Shapes]] = {
    "addition": Addition,
    "addition_pairs": AdditionPairs,
    "guess_number": GuessNumberTask,
    "shapes": Shapes,
}


class GeneratedRows:
    """Rows of a task, made when they are read."""

    is_held = False
    """Whether all rows are in memory and were checked."""

    def __init__(self, spec: str, options: dict[str, Any], *, size: int, seed: int, split: Split):
        if size < 1:
            raise Refusal(f"{spec}: a generated task needs a size of at least 1, got {size}")
        self.spec = spec
        self.seed = seed
        self.split = split
        self._size = size
        self.task = make_task(spec, options, size=size)

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> dict:
        if not 0 <= index < self._size:
            raise IndexError(index)
        return self.task.row(self.seed, index, split=self.split)

    def where(self, index: int) -> str:
        """Return the origin of a row for error messages."""
        return f"{self.spec} ({self.split}, seed {self.seed}): row {index + 1}"
