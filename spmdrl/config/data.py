"""Settings of the rows that a run trains on and is evaluated with, from one source or several."""

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
    """One of several sources of rows. An empty field takes its value from the section `data`."""

    path: PathText = ""
    """File, dataset or task, in the forms of data.train. Required."""
    name: str = ""
    """Name in its metrics, e.g. source/gsm8k/reward; empty: that of the file, task or dataset."""
    weight: Annotated[float, within(0, 10**6)] = 0.0
    """Share of a step's prompts, relative to the weights of the other sources. 0 in all sources:
    their numbers of rows, so that an epoch takes each row once. Evaluation takes all rows of all
    sources."""
    size: Size = 0
    """Rows to take; 0: data.size, or data.eval_size in evaluation."""
    task_options: Options = field(default_factory=dict)
    """Keyword options of a generated task; empty: data.task_options."""
    columns: dict[str, str] = field(default_factory=dict)
    """Columns to rename; empty: data.columns."""
    rewards: tuple[PathText, ...] = ()
    """Reward functions of its rows instead of rewards.functions, with weight 1 unless they are
    listed there too; empty: rewards.functions, or the grader of a generated task."""
    environment: NestedOptions | Literal["none"] = field(default_factory=dict)
    """Environment of its rows instead of rollout.environment, in the same form; `none`: responses
    are final. Empty: rollout.environment."""
    teacher: PathText = ""
    """Teacher of its rows instead of model.teacher, in the same forms; empty: model.teacher."""
    teacher_prompt: str = ""
    """What the teacher reads instead of its rows' prompts; empty: data.teacher_prompt."""

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
    """Limits on the images of rows, for a vision model."""

    max_per_prompt: Annotated[int, within(1, 4096)] = 16
    """Most images of one prompt, or of one answer of an environment. A row with more is refused."""
    max_pixels: Annotated[int, within(1, 2**27)] = 2**25
    """Largest image, pixels, before the model's processor resizes it. A larger one is refused by
    its header, before it is unpacked to 3 bytes per pixel."""


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
    question, answer: solution}. Every row of `train` and `eval` must have them."""
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
    """A .jsonl or .parquet file above this size, MiB, stays on disk. A row then takes 8 to 24 bytes
    of memory; the first 256 are checked at start, others when they are read. See docs/data.md."""
    images: ImageSettings = field(default_factory=ImageSettings)
    teacher_prompt: str = ""
    """What the teacher reads instead of the prompt, to know more than the policy: a column (text or
    messages), or a template with columns in braces, e.g. "{prompt} Hint: {answer}\\n". In a
    conversation the template makes the last message of `prompt`. Empty: the prompt. See
    docs/distillation.md."""
    max_teacher_prompt_tokens: Tokens = 2048
    """Longest prompt of a teacher under teacher_prompt, in tokens."""
    chat_template_kwargs: NestedOptions = field(default_factory=dict)
    """Further arguments of the chat template, e.g. {enable_thinking: false}. Names that it does not
    know are refused."""
    generation_prefix: str = ""
    """Text that each turn of the policy begins with, e.g. "<think>". It is a part of the prompt: it
    is not trained on, and reward functions do not see it in the response."""
    chat_template: Literal["auto", "always", "never"] = "auto"
    """`auto` applies it to message lists and leaves plain strings alone."""

    def sources(self, split: Split) -> tuple[SourceSettings, ...]:
        """Return the sources of `train` or `eval`, with empty fields filled in and names that
        differ."""
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
                teacher_prompt=source.teacher_prompt or self.teacher_prompt,
            )
            for i, (source, name) in enumerate(zip(given, names))
        )

    def all_sources(self) -> tuple[SourceSettings, ...]:
        """Return the sources of `train`, then those of `eval`, in the order of `Prompt.source`."""
        return (*self.sources("train"), *self.sources("eval"))

    def paths(self, split: Split) -> list[str]:
        """Return the paths of the sources of `train` or `eval`, in order."""
        return [source.path for source in self.sources(split)]


def _name_of(path: str) -> str:
    """Return the last part of a path, hub dataset or task, in letters that a metric may have."""
    name = PurePath(path).name
    name = name.rpartition(":")[2] if path.startswith(_GENERATED) else name
    return re.sub(r"[^\w.-]+", "_", name.removesuffix(PurePath(name).suffix)) or "rows"
