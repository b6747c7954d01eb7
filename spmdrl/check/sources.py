"""Whether sources of rows are right, each alone and together with the others."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import partial

from spmdrl.config.data import SPLITS, SourceSettings, Split
from spmdrl.config.fields import Config
from spmdrl.data.tasks import is_generated, unknown_task
from spmdrl.data.teacher_templates import template_fields
from spmdrl.imports import attempt

_LEAST_SHARE = 1e-4  # see data/prompt_order.py


def source_problems(cfg: Config) -> Iterator[str]:
    """Yield what is wrong with data.train and data.eval."""
    for split in SPLITS:
        yield from _size_problems(cfg, split)
        yield from _list_problems(cfg, split)
    yield from _weight_problems([source.weight for source in cfg.data.sources("train")])
    paths = [path for split in SPLITS for path in cfg.data.paths(split)]
    if cfg.data.columns and all(map(is_generated, paths)):
        yield (
            f"data.columns: {cfg.data.columns} renames columns of files, and "
            f"{', '.join(dict.fromkeys(paths))} is generated, with names of its own; leave it out"
        )
    # Generated sources without options of their own have these; see DataSettings.sources.
    options = cfg.data.task_options
    takers = [s for s in cfg.data.all_sources() if s.is_generated and s.task_options == options]
    if options and paths and not takers:
        yield (
            f"data.task_options: {options} are of a generated task, and of "
            f"{', '.join(dict.fromkeys(paths))} none takes them; leave them out, as in "
            "--data.task-options {}"
        )
    yield from _teacher_problems(cfg)
    fields = [field for field, _ in cfg.environments()]
    if cfg.rollout.environment and fields and "rollout.environment" not in fields:
        yield (
            f"rollout.environment: {dict(cfg.rollout.environment)} is of no rows, since "
            f"{', '.join(fields)} are given; leave it out, or one of those"
        )


def _teacher_problems(cfg: Config) -> Iterator[str]:
    """Yield what is wrong with the teachers of sources and what these read."""
    own = _listed(cfg, "train")
    if cfg.model.teacher and own and all(source.teacher for source in own):
        yield (
            f"model.teacher: {cfg.model.teacher} is of no rows, since each source of data.train "
            "has a teacher; leave it out"
        )
    prompts = {"data.teacher_prompt": cfg.data.teacher_prompt}
    prompts |= {f"data.train[{i}].teacher_prompt": one.teacher_prompt for i, one in enumerate(own)}
    for field, prompt in prompts.items():
        _, error = attempt(partial(template_fields, prompt))
        if error:
            yield f"{field}: {error}"
    for field in ("teacher", "teacher_prompt"):
        if any(getattr(source, field) for source in _listed(cfg, "eval")):
            yield f"data.eval: {field}: evaluation follows no teacher; leave it out"


def _size_problems(cfg: Config, split: Split) -> Iterator[str]:
    is_list = bool(_listed(cfg, split))
    for i, source in enumerate(cfg.data.sources(split)):
        if problem := unknown_task(source.path):
            yield f"data.{split}: {problem}"
        elif is_generated(source.path) and not source.size:
            field = "size" if split == "train" else "eval_size"
            if is_list:
                field = f"{split}[{i}].size"
            yield (
                f"data.{field}: a generated task ({source.path}) has no size of its own; set how "
                "many problems to make"
            )


def _listed(cfg: Config, split: Split) -> Sequence[SourceSettings]:
    """Return the sources as the config lists them; none for a single path."""
    given = cfg.data.train if split == "train" else cfg.data.eval
    return () if isinstance(given, str) else given


def _list_problems(cfg: Config, split: Split) -> Iterator[str]:
    names = [source.name for source in cfg.data.sources(split)]
    for i, (source, name) in enumerate(zip(_listed(cfg, split), names)):
        where = f"data.{split}[{i}]"
        if not source.path:
            yield f"{where}.path: is required and empty"
        if not re.fullmatch(r"[\w.-]{1,64}", name):
            yield (
                f"{where}.name: {name!r:.80} names metrics; use up to 64 letters, digits and . _ -"
            )
        if source.columns and is_generated(source.path):
            yield (
                f"{where}.columns: renames columns of files, and {source.path} is generated, with "
                "names of its own; leave it out"
            )
        if source.task_options and not is_generated(source.path):
            yield f"{where}.task_options: {source.path} is no generated task; leave it out"
        for field in ("rewards", "environment"):
            if getattr(source, field) and not cfg.objective.samples:
                yield f"{where}.{field}: nothing is sampled under this objective; leave it out"
        if source.weight and split == "eval":
            yield f"{where}.weight: evaluation takes each row of each source; leave it out"
    if twice := {name for name in names if names.count(name) > 1}:
        yield f"data.{split}: two sources are called {min(twice)!r}; give them names of their own"


def _weight_problems(weights: Sequence[float]) -> Iterator[str]:
    absent = [f"[{i}]" for i, weight in enumerate(weights) if not weight]
    if any(weights) and absent:
        yield (
            f"data.train{', '.join(absent)}.weight: is missing, and others have one; give each "
            "source a weight, or none, which takes of each as many rows as it has"
        )
    elif any(weights) and min(weights) < _LEAST_SHARE * sum(weights):
        yield (
            f"data.train: weights {', '.join(f'{w:g}' for w in weights)}: the least share that a "
            f"source can have is {_LEAST_SHARE:g}"
        )
