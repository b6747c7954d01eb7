"""The weights of entropy bonus and KL over the steps: fixed, on a schedule, or toward a target."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from spmdrl.algorithms.entropy import adaptive_entropy_coef
from spmdrl.algorithms.shaping import adaptive_kl_coef
from spmdrl.config import CoefficientScheduleSettings, Config
from spmdrl.types import Sums


class Coefficients:
    """The factors of the entropy bonus and of the KL in the current step.

    They stay at algorithm.entropy_coef and algorithm.kl_coef unless entropy_control or kl_control
    name a target, or entropy_schedule or kl_schedule a number of steps. Under a target they move
    after every step by the step's sums over all trainer ranks, so they are equal on all ranks, and
    a checkpoint stores them. A schedule is a function of the step.

    Args:
        cfg: the config.
    """

    def __init__(self, cfg: Config):
        chosen = cfg.algorithm
        self.kl = chosen.kl_coef
        self.entropy = chosen.entropy_coef
        self._carried = chosen.entropy_coef  # goes on moving while `entropy` is off
        self._kl_control = chosen.kl_control
        self._entropy_control = chosen.entropy_control
        self._chosen = chosen

    def begin(self, step: int) -> None:
        """Set the coefficients that follow a schedule to their values at a step."""
        chosen = self._chosen
        if chosen.kl_schedule.is_on:
            self.kl = scheduled(chosen.kl_coef, chosen.kl_schedule, step)
        if chosen.entropy_schedule.is_on:
            self.entropy = scheduled(chosen.entropy_coef, chosen.entropy_schedule, step)

    def move(self, sums: Sums, *, num_samples: int) -> Sums:
        """Compute the next step's coefficients from what this step measured.

        Args:
            sums: of the step's updates, over all trainer ranks: policy/entropy and, for the KL,
                policy/kl_ref; absent when every update was skipped.
            num_samples: sequences of the step.
        Returns: policy/entropy_coef and policy/kl_coef as used in this step; {} for fixed ones.
        """
        used: Sums = {}
        if self._entropy_control.is_on or self._chosen.entropy_schedule.is_on:
            used["policy/entropy_coef"] = (self.entropy, 1.0)
        if self._kl_control.is_on or self._chosen.kl_schedule.is_on:
            used["policy/kl_coef"] = (self.kl, 1.0)
        if self._entropy_control.is_on:
            own = self._entropy_control
            self._carried, self.entropy = adaptive_entropy_coef(
                self._carried,
                entropy=_mean(sums, "policy/entropy"),
                target=own.target,
                delta=own.delta,
                lower=own.lower,
                upper=own.upper,
            )
        if self._kl_control.is_on:
            kl = _mean(sums, "policy/kl_ref")
            # There is no KL if every update was skipped.
            if math.isfinite(kl):
                self.kl = adaptive_kl_coef(
                    self.kl,
                    kl=kl,
                    num_samples=num_samples,
                    target=self._kl_control.target,
                    horizon=self._kl_control.horizon,
                )
        return used

    def state_dict(self) -> dict[str, Tensor]:
        """Return the state for a checkpoint: copies, float64; {} if they have no target."""
        state = {}
        if self._entropy_control.is_on:
            state["entropy"] = torch.tensor([self._carried, self.entropy], dtype=torch.float64)
        if self._kl_control.is_on:
            state["kl"] = torch.tensor(self.kl, dtype=torch.float64)
        return state

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore what `state_dict` returned."""
        if "entropy" in state:
            self._carried, self.entropy = state["entropy"].tolist()
        if "kl" in state:
            self.kl = float(state["kl"])


def scheduled(start: float, schedule: CoefficientScheduleSettings, step: int) -> float:
    """Return a coefficient at a step, from 0, of a schedule that is on."""
    done = min(1.0, step / schedule.steps)
    return start + (schedule.end - start) * done


def _mean(sums: Sums, name: str) -> float:
    total, count = sums.get(name, (math.nan, 0.0))
    return total / count if count else math.nan
