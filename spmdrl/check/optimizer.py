"""Whether the optimizer's settings are right by themselves."""

from __future__ import annotations

import math
from collections.abc import Iterator

from spmdrl.config.fields import Config


def optimizer_problems(cfg: Config) -> Iterator[str]:
    """Yield what is wrong with the section `optimizer`, each as `field: what, value seen`."""
    own = cfg.optimizer.loss_scale
    if cfg.model.compute_dtype == "float16" and not math.log2(own.initial).is_integer():
        yield (
            f"optimizer.loss_scale.initial: must be a power of 2, so that dividing by it changes "
            f"no bits, got {own.initial:g}; take {2.0 ** round(math.log2(own.initial)):g}"
        )
