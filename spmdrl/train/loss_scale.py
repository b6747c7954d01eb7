"""The factor of the loss before the backward pass, under compute_dtype float16.

float16 has 11 significant bits and bfloat16 has 8, so trainer and engine agree more closely. But it
has only 5 bits for the exponent: gradients below 6e-8 become 0, and those above 65504 infinite. A
factor on the loss moves them into that range. It is a power of two, so dividing the float32
gradients by it is exact.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from spmdrl.config import LossScaleSettings

LEAST = 1.0


class LossScale:
    """The factor is halved after an update whose gradient overflowed, and doubled after
    `growth_interval` updates without overflow.

    It is equal on all ranks: they see one global norm, which is infinite if any part of it is.

    Args:
        options: the config's optimizer.loss_scale.
        is_on: under float16; else the factor is 1 and never moves.
    Source: arXiv 1710.03740, section 3.2; torch.amp.GradScaler, its factors and defaults.
    """

    def __init__(self, options: LossScaleSettings, *, is_on: bool):
        self.is_on = is_on
        self._growth_interval = options.growth_interval
        self.value = options.initial if is_on else 1.0
        self._num_good = 0

    def overflowed(self, *, is_finite: bool) -> bool:
        """Adjust the factor after an update; return whether the gradient overflowed.

        A gradient that is not finite at a factor of 1 is no overflow: no factor can mend it.
        """
        if not self.is_on:
            return False
        if is_finite:
            self._num_good += 1
            if self._num_good == self._growth_interval:
                self.value = 2 * self.value
                self._num_good = 0
            return False
        self._num_good = 0
        is_overflow = self.value > LEAST
        self.value = max(LEAST, self.value / 2)
        return is_overflow

    def state_dict(self) -> dict[str, Tensor]:
        """Return the state for a checkpoint: copies; {} where it is off."""
        if not self.is_on:
            return {}
        return {"state": torch.tensor([self.value, self._num_good], dtype=torch.float64)}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore what `state_dict` returned."""
        value, num_good = state["state"].tolist()
        self.value = value
        self._num_good = int(num_good)
