"""Settings of the rows that a run trains on and is evaluated with, of one source or several."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePath
from typing import Annotated, Literal

from spmdrl.config.options import NestedOptions, Options
from spmdrl.config.ranges import PathText, Tokens, above, within

Split = Literal["train", "eval"]
SPLITS: tuple[Split, ...] = ("train", "eval")
_GENERATED = ("task:", "reasoning_gym:")  # as in data/tasks.py
Size = Annotated[int, within(0, 10**8)]


@dataclass(frozen=True)
class SourceSettings:
    """One of several sources of rows. Where it is silent, `data` speaks for it."""

    path: PathText = ""
    """As data.train of one source. Required."""
    name: str = ""
    """Of its metrics, e.g. source/gsm8k/reward; empty: the file's, task's or dataset's own."""
    weight: Annotated[float, within(0, 10**6)] = 0.0
    """Its share of the prompts of a step, beside the weights of the others. 0, in all sources: as
    many as it has rows, so that an epoch takes each row of all once. Evaluation takes each row of
    each."""
    size: Size = 0
    """Rows to take; 0: data.size, or data.eval_size in evaluation."""
    task_options: Options = field(default_factory=dict)
    """Keyword options of a generated task; empty: data.task_options."""
    columns: dict[str, str] = field(default_factory=dict)
    """Columns to rename; empty: data.columns."""
    rewards: tuple[PathText, ...] = ()
    """Reward functions of its rows in place of rewards.functions, with weight 1 where they do not
    stand there too; empty: those, or the own grader of a generated task."""
    environment: NestedOptions | Literal["none"] = field(default_factory=dict)
    """What answers the policy in its rows, as rollout.environment, in place of that; `none`: its
    responses are final. Empty: rollout.environment."""

    @property
    def is_generated(self) -> bool:
        """Whether its rows are made by a task."""
        return self.path.startswith(_GENERATED)

    @property
    def folder(self) -> Path | None:
        """The folder that holds its rows, and images that they name; None where there is none."""
        path = Path(self.path).expanduser()
        if self.is_generated or path.is_file():
            return None if self.is_generated else path.parent
        folder = Path(self.path.split(":")[0]).expanduser()
        return folder if folder.is_dir() else None


@dataclass(frozen=True)
class ImageSettings:
    """What images of rows may be, for a model that sees."""

    max_per_prompt: Annotated[int, within(1, 4096)] = 16
    """Images of one prompt, at most; of one answer of an environment too. A row with more is
    refused."""
    max_pixels: Annotated[int, within(1, 2**27)] = 2**25
    """Largest image, pixels, before the model's processor resizes it: by its header a larger one is
    refused before its pixels, 3 bytes each, are made of what may be a few packed ones."""


@dataclass(frozen=True)
class DataSettings:
    """Rows that prompts (or supervised examples) come from."""

    train: PathText | tuple[SourceSettings, ...] = ""
    """JSONL or parquet file, hub dataset name, or generated task (`task:addition`,
    `reasoning_gym:NAME`); or a list of several, with weights and more: docs/data.md. Required."""
    eval: PathText | tuple[SourceSettings, ...] = ""
    """Held-out rows for evaluation, same forms; empty switches evaluation off."""
    columns: dict[str, str] = field(default_factory=dict)
    """Columns of files and hub datasets to rename, {name: name in the file}, e.g. {prompt:
    question, answer: solution}. Every row must have them. Of `train` and of `eval`."""
    task_options: Options = field(default_factory=dict)
    """Keyword options of a generated task, e.g. {digits: 3}."""
    size: Size = 0
    """Rows to take: required for a generated task, 0 means all rows of a file."""
    eval_size: Size = 256
    """Held-out rows to take from `eval`; 0 means all."""
    shuffle: bool = True
    """New order each epoch, a function of (seed, epoch) alone."""
    max_prompt_tokens: Tokens = 1024
    """Longest prompt in tokens."""
    overlong_prompts: Literal["error", "drop"] = "error"
    """A prompt above max_prompt_tokens stops the run at start, or is dropped and counted."""
    max_row_mib: Annotated[float, above(0, 4096)] = 16.0
    """Largest row, MiB of its texts; a larger one is refused before all of it is read."""
    stream_above_mib: Annotated[float, within(0, 10**9)] = 1024.0
    """A .jsonl or .parquet file above this size, MiB, stays on disk: a row takes 8 to 24 bytes of
    memory, and is checked in its turn, at start the first 256 are; see docs/data.md."""
    images: ImageSettings = field(default_factory=ImageSettings)
    chat_template_kwargs: NestedOptions = field(default_factory=dict)
    """What the chat template is given besides the messages, wherever it is applied, as in
    {enable_thinking: false}. Names that it does not know are refused."""
    generation_prefix: str = ""
    """Text that each turn of the policy begins with, as in "<think>": a part of the prompt, which
    is not trained on and which reward functions do not see in the response."""
    chat_template: Literal["auto", "always", "never"] = "auto"
    """`auto` applies it to message lists and leaves plain strings alone."""

    def sources(self, split: Split) -> tuple[SourceSettings, ...]:
        """Return the sources of `train` or `eval`, each with all that holds for it and a name of
        its own; none where nothing is named."""
        given = self.train if split == "train" else self.eval
        if isinstance(given, str):
            given = (SourceSettings(given),) if given else ()
        names = [source.name or _name_of(source.path) for source in given]
        counts = Counter(names)
        return tuple(
            replace(
                source,
                name=name if counts[name] == 1 or source.name else f"{name}_{i}",
                size=source.size or (self.size if split == "train" else self.eval_size),
                task_options=source.task_options or self.task_options,
                columns=source.columns or self.columns,
            )
            for i, (source, name) in enumerate(zip(given, names))
        )

    def all_sources(self) -> tuple[SourceSettings, ...]:
        """Return the sources of `train`, those of `eval` behind them, as `Prompt.source` counts."""
        return (*self.sources("train"), *self.sources("eval"))

    def paths(self, split: Split) -> list[str]:
        """Return what `train` or `eval` names, in order."""
        return [source.path for source in self.sources(split)]


def _name_of(path: str) -> str:
    """Return the last name of a path, hub dataset or task, as metrics can have it."""
    name = PurePath(path).name
    name = name.rpartition(":")[2] if path.startswith(_GENERATED) else name
    return re.sub(r"[^\w.-]+", "_", name.removesuffix(PurePath(name).suffix)) or "rows"
