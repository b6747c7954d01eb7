"""The base class of losses over micro-batches, and which subclass a config uses."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType

import torch
from torch import Tensor

from spmdrl.algorithms import registry
from spmdrl.algorithms.registry import Method
from spmdrl.config import Config
from spmdrl.model.sharded_model import ShardedModel
from spmdrl.train.coefficients import Coefficients
from spmdrl.train.companions.companion import Companion
from spmdrl.train.microbatches import LossOf, PreparedMicrobatch, Stats
from spmdrl.types import Batch
from spmdrl.world.world import World

Known = Mapping[str, Tensor]
"""Scalars of the whole batch, [] each: what `statistics` returned, and `version`, int64, the
policy version that is being trained."""


class ObjectiveLoss:
    """Makes the loss of micro-batches, on the trainer ranks. The base class needs no columns.

    Args:
        cfg, world: the config and this rank's view of the job.
        loss_fn: computes the terms.
        coefficients: of KL and entropy bonus; read again at each call.
        companions: the models beside the policy, by name.
    """

    def __init__(
        self,
        cfg: Config,
        world: World,
        *,
        loss_fn: Method,
        coefficients: Coefficients,
        companions: Mapping[str, Companion] = MappingProxyType({}),
    ):
        self.cfg = cfg
        self._loss = loss_fn
        self._coefficients = coefficients
        self.on_logprobs: Callable[[Tensor], None] | None = None
        """Called for each micro-batch of rollouts, with the logprobs [T] of the policy before the
        step's updates."""

    @classmethod
    def columns_of(cls, cfg: Config, *, loss_fn: Method, advantage_fn: Method) -> set[str]:
        """Return the per-token columns that `Trainer.annotate` has to find first."""
        return set()

    def with_columns(self, batch: Batch) -> Batch:
        """Add the columns that follow from the batch alone."""
        return batch

    def statistics(
        self, updates: Sequence[Sequence[PreparedMicrobatch]], *, world: World
    ) -> dict[str, Tensor]:
        """Return [] scalars of the whole batch, once before its updates; trainers meet here."""
        return {}

    def of_updates(
        self, updates: Sequence[Sequence[PreparedMicrobatch]], model: ShardedModel, *, step: int
    ) -> LossOf:
        """Return the loss of a step's micro-batches; trainers meet where it asks for scalars."""
        known = self.statistics(updates, world=model.world)
        version = torch.tensor(step, device=model.world.device)
        return partial(self, model, known=known | {"version": version})

    def __call__(
        self, model: ShardedModel, microbatch: PreparedMicrobatch, *, known: Known
    ) -> tuple[Tensor, Stats]:
        """Run one micro-batch forward and return its share of the loss and its metrics.

        Args:
            model: in training.
            microbatch: with the columns of `columns_of` and `with_columns`.
            known: of the whole batch.
        Returns: [] float64 share (shares of all micro-batches and dp ranks add up to the
            loss) and its metrics.
        Invariant under: dp size, micro-batching, packing order.
        """
        raise NotImplementedError


def gather_columns(own: Sequence[Mapping[str, Tensor]], *, world: World) -> dict[str, Tensor]:
    """Return {name: [N] float64 on the CPU} of the whole batch; trainers meet.

    Args:
        own: of each of this rank's micro-batches, [n] each, of the same names.
    """
    names = list(own[0])
    table = torch.cat([torch.stack([one[n].double() for n in names]) for one in own], dim=1)
    parts = world.gather_per_dp(table.cpu().numpy())
    columns = torch.cat([torch.from_numpy(part) for part in parts], dim=1)
    return dict(zip(names, columns))


def loss_class(cfg: Config) -> type[ObjectiveLoss]:
    """Return the class that computes the loss of the config's objective."""
    module, name = cfg.objective.loss_class.split(":")
    return getattr(importlib.import_module(module), name)


def named_methods(cfg: Config) -> dict[str, Method]:
    """Return the loss_fn and the advantage_fn that a config names.

    Raises: Refusal for an unknown one.
    """
    return {
        "loss_fn": registry.get(cfg.objective.loss_kind, cfg.loss_name),
        "advantage_fn": registry.get("advantage", cfg.algorithm.advantage),
    }


def needed_columns(cfg: Config) -> set[str]:
    """Return the per-token columns that the configured methods need from `Trainer.annotate`.

    Raises: Refusal for an unknown method.
    """
    return loss_class(cfg).columns_of(cfg, **named_methods(cfg))


def follows_teacher(cfg: Config) -> bool:
    """Return whether the configured methods follow a teacher.

    Raises: Refusal for an unknown method.
    """
    return cfg.objective.needs_teacher or "teacher_logprobs" in needed_columns(cfg)
