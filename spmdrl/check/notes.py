"""What a config may mean, and often does not: said at start, and nothing is refused for it."""

from __future__ import annotations

from collections.abc import Iterator

from spmdrl.config.fields import Config
from spmdrl.data.tasks import is_generated
from spmdrl.imports import is_same_file


def notes(cfg: Config) -> list[str]:
    """Return what a valid config may not have been meant to say, each as `field: what, value seen,
    what to do`."""
    return [*_warmup_notes(cfg), *_held_out_notes(cfg)]


def _warmup_notes(cfg: Config) -> Iterator[str]:
    warmup = cfg.optimizer.warmup_steps
    steps = cfg.steps
    if warmup > steps:
        reached = cfg.optimizer.lr * steps / warmup
        yield (
            f"optimizer.warmup_steps: {warmup} of steps {steps}: the learning rate ends at "
            f"{reached:g} and never comes to optimizer.lr {cfg.optimizer.lr:g}; lower it, or raise "
            "steps"
        )


def _held_out_notes(cfg: Config) -> Iterator[str]:
    for path in cfg.data.paths("eval"):
        if is_generated(path):  # its held-out problems are others
            continue
        if any(path == own or is_same_file(path, own) for own in cfg.data.paths("train")):
            yield (
                f"data.eval: {path} is in data.train too: the evaluation asks what was trained on; "
                "name rows that are held out"
            )
