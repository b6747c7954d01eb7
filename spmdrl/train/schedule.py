"""The learning rate of each step."""

from __future__ import annotations

import math

from spmdrl.config import OptimizerSettings


def learning_rate(options: OptimizerSettings, step: int, *, steps: int) -> float:
    """Return the learning rate of a step: a pure function, so that a resume needs no state.

    Args:
        options: schedule, peak, warm-up.
        step: from 0.
        steps: of the whole run.
    """
    warmup_steps = options.warmup_steps
    min_lr_frac = options.min_lr_frac
    if step < warmup_steps:
        return options.lr * (step + 1) / warmup_steps
    if options.schedule == "constant":
        return options.lr
    done = (step - warmup_steps) / max(1, steps - warmup_steps)
    done = min(1.0, done)
    left = 1 - done if options.schedule == "linear" else 0.5 * (1 + math.cos(math.pi * done))
    return options.lr * (min_lr_frac + (1 - min_lr_frac) * left)
