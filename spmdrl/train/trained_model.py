"""A sharded model with its optimizer: micro-batches in, one optimizer step out."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy
from torch import Tensor

from spmdrl.config import OptimizerSettings
from spmdrl.model.parallel.recompute import check_offload
from spmdrl.model.sharded_model import ShardedModel
from spmdrl.train.gradient_norm import copies, square_sums
from spmdrl.train.loss_scale import LossScale
from spmdrl.train.make_optimizer import make_optimizer
from spmdrl.train.microbatches import LossOf, PreparedMicrobatch
from spmdrl.train.repeatable_attention import repeat_attention
from spmdrl.train.router_balance import Routers
from spmdrl.train.schedule import learning_rate
from spmdrl.train.step import GlobalTotals, Totals, dump_skipped, exchange_totals
from spmdrl.types import Sums, add_sums
from spmdrl.world.torch_internals import multiply_all


class TrainedModel:
    """Trains one sharded model, on the trainer ranks.

    Args:
        model: with trainable parameters.
        options: of the optimizer.
        name: first part of the metrics' names: `policy`, `value` or `prm`.
    Raises: Refusal when model.memory.offload asks for what this device cannot do.
    """

    def __init__(self, model: ShardedModel, options: OptimizerSettings, *, name: str = "policy"):
        self.model = model
        self.options = options
        self.name = name
        self.cfg, self.world = cfg, world = model.cfg, model.world
        self.on_gradients: Callable[..., None] | None = None
        """Called before each optimizer step, with this rank's gradients by name before they are
        clipped, with `step`, and with the update's `number` in the batch. It must not change the
        gradients."""
        shards = {name: p for name, p in model.named_shards().items() if p.requires_grad}
        kept = cfg.model.memory
        check_offload(kept.offload, world.device)
        self.optimizer = make_optimizer(model, shards, options, name=name)
        self.routers = Routers(model, name=name)
        self.loss_scale = LossScale(options.loss_scale, is_on=cfg.model.compute_dtype == "float16")
        self._reduces_last = kept.reduce == "last"
        trainers = len(world.trainer_ranks)
        self._copies = {name: copies(p, num_trainers=trainers) for name, p in shards.items()}
        self._layers = [*dict.fromkeys(model.layers[name] for name in shards)]
        # FSDP2 averages gradients over these ranks; the loss is a sum.
        self._averaged = world.mesh.size() // world.mesh["tp"].size()

    def update(
        self, updates: Sequence[Sequence[PreparedMicrobatch]], loss_of: LossOf, *, step: int
    ) -> Sums:
        """Take one optimizer step for each of a batch's updates, in every epoch.

        An update whose loss or gradient norm is not finite is skipped on all ranks together,
        counted, and its micro-batches are saved under output_dir/skipped (skipped_value). They are
        not saved if the gradient overflowed float16, which the loss scale handles.

        Args:
            updates: this rank's micro-batches, those of all epochs; every trainer rank has
                equally many.
            loss_of: called once per micro-batch, in order.
            step: training step, for the schedule.
        Returns: sums over all trainer ranks, equal on each of them.
        """
        found = [
            self._take_step(microbatches, loss_of, step=step, number=number)
            for number, microbatches in enumerate(updates)
        ]
        return add_sums(*found) | of_last_epoch(found, epochs=self.cfg.batch.epochs)

    def _take_step(
        self, microbatches: Sequence[PreparedMicrobatch], loss_of: LossOf, *, step: int, number: int
    ) -> Sums:
        # The scale of this update, for the metrics: `overflowed` may change it below.
        scale = self.loss_scale.value
        every = self.cfg.report.layer_norms
        layers = self._layers if every and step % every == 0 else ()
        gradients, totals = self._measure(microbatches, loss_of, layers=layers)
        if self.on_gradients:
            self.on_gradients(gradients, step=step, number=number)
        lr = learning_rate(self.options, step, steps=self.cfg.steps)
        if totals.is_finite:
            max_norm = self.options.max_grad_norm  # 0 is off
            if max_norm and totals.grad_norm > max_norm:
                multiply_all(list(gradients.values()), max_norm / totals.grad_norm)
            self.optimizer.step(gradients, lr=lr)
        # If the loss itself is not finite, a smaller scale would not help, so it stays as it is.
        is_overflow = math.isfinite(totals.loss) and self.loss_scale.overflowed(
            is_finite=totals.is_finite
        )
        if not (totals.is_finite or is_overflow):
            folder = "skipped" if self.name == "policy" else f"skipped_{self.name}"
            name = f"step_{step}{f'_{number}' if number else ''}_rank_{self.world.rank}.pt"
            file = Path(self.cfg.output_dir) / folder / name
            dump_skipped(microbatches, totals, file, step=step, update=number)
        self.optimizer.zero_grad()
        sums = self._sums(totals, lr=lr, is_first=number == 0)
        if self.loss_scale.is_on:
            overflow = (float(is_overflow), float(number == 0))
            sums |= {f"{self.name}/loss_scale": (scale, 1.0)}
            sums |= {f"{self.name}/overflowed_updates": overflow}
        return sums | self.routers.finish(is_taken=totals.is_finite)

    def _measure(
        self,
        microbatches: Sequence[PreparedMicrobatch],
        loss_of: LossOf,
        *,
        layers: Sequence[str] = (),
    ) -> tuple[dict[str, Tensor], GlobalTotals]:
        """Return {name: live local gradient} of micro-batches, unclipped and without the loss
        scale, and the totals of all trainer ranks, with the norms of `layers`."""
        own = self._accumulate(microbatches, loss_of)
        scale = self.loss_scale.value
        gradients = self.optimizer.gradients()
        self.model.complete(gradients)
        # Before the norm, which max_grad_norm bounds without the scale.
        if scale != 1:
            multiply_all(list(gradients.values()), 1 / scale)
        shares = square_sums(gradients, self._copies, layer_of=self.model.layers, layers=layers)
        return gradients, exchange_totals(own, shares, world=self.world, layers=layers)

    def gradient(
        self, microbatches: Sequence[PreparedMicrobatch], loss_of: LossOf
    ) -> tuple[dict[str, Tensor], GlobalTotals]:
        """Return the gradient that `update` would use, and change neither model, optimizer nor
        routers; trainer ranks meet.

        Returns: {name: local gradient}, copies, unclipped; and the totals of all ranks.
        """
        gradients, totals = self._measure(microbatches, loss_of)
        kept = {name: gradient.detach().clone() for name, gradient in gradients.items()}
        self._forget()
        return kept, totals

    def _accumulate(self, microbatches: Sequence[PreparedMicrobatch], loss_of: LossOf) -> Totals:
        """Run all micro-batches forward and backward; gradients add up in the parameters."""
        totals = Totals()
        self.routers.prepare(microbatches, loss_of)
        for index, microbatch in enumerate(microbatches):
            self._reduce(is_last=index == len(microbatches) - 1)
            with self.routers.watching(microbatch):
                loss, stats = loss_of(microbatch)
            total = (loss + self.routers.take()) * (self._averaged * self.loss_scale.value)
            repeat_attention(total)
            total.backward()
            totals.add(microbatch, loss, stats)
        return totals

    def _reduce(self, *, is_last: bool) -> None:
        """Set which gradients FSDP2 reduces in the next backward pass.

        The all-reduce over copies of the shards waits for the last micro-batch, when all gradients
        are added up. Under model.memory.reduce `last` the reduce-scatter waits too.
        """
        if self._reduces_last:
            self.model.scorer.set_requires_gradient_sync(is_last)
        else:
            self.model.scorer.set_requires_all_reduce(is_last)

    def rehearse(self, microbatches: Sequence[PreparedMicrobatch], loss_of: LossOf) -> None:
        """Run micro-batches as `update` does, and drop gradients and metrics. Model, optimizer and
        routers do not change."""
        self._accumulate(microbatches, loss_of)
        self._forget()

    def _forget(self) -> None:
        self.optimizer.zero_grad()
        self.routers.finish(is_taken=False)

    def state_dict(self) -> dict[str, Any]:
        """Return model and optimizer state as nested dicts of DTensors that share live storage.

        Names are the model's own for its parameters. Loading into the tensors in place restores
        all but copies (scales of 8 bits and of the loss), which `load_state_dict` takes.
        """
        state = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        scale = self.loss_scale.state_dict()
        return state | ({"loss_scale": scale} if scale else {})

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned, after it was loaded onto this layout."""
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        if self.loss_scale.is_on:
            self.loss_scale.load_state_dict(state["loss_scale"])

    def _sums(self, totals: GlobalTotals, *, lr: float, is_first: bool) -> Sums:
        once = float(is_first)  # denominator of totals over the step's updates
        is_finite = totals.is_finite
        name = self.name
        sums: Sums = {
            f"{name}/lr": (lr, 1.0),
            f"{name}/skipped_updates": (float(not is_finite), once),
        }
        if name == "policy":
            trained = totals.num_tokens if is_finite else 0.0
            sums["perf/trained_tokens"] = (trained, once)
        if not is_finite:
            return sums
        sums |= {f"{name}/loss": (totals.loss, 1.0), f"{name}/grad_norm": (totals.grad_norm, 1.0)}
        for layer, norm in totals.layer_norms.items():
            sums[f"{name}/grad_norm_layer/{layer}"] = (norm, 1.0)
        return totals.stats | sums


Update = TypeVar("Update")

_AT_THE_END = ("policy/kl_old", "policy/clip_frac")


def in_epochs(updates: Sequence[Update], *, epochs: int, seed: int, step: int) -> list[Update]:
    """Return the updates of a batch, once for each epoch, in the order in which they are taken.

    The first epoch has the batch's order. Each later one has an order of its own, drawn by
    (seed, step, epoch) and never by the rank, so that it is the same on all of them and a resumed
    run repeats it.

    Args:
        updates: of the batch, in its order.
        epochs: at least 1.
        seed, step: of the run, and the training step.
    Returns: [epochs * updates]; an update is the same object each time.
    Source: Schulman et al. 2017, PPO (arXiv 1707.06347), algorithm 1: K epochs over a batch. An
        update holds the same sequences in every epoch, as in verl and TRL; their order is drawn as
        in openai/baselines ppo2.
    """
    found = list(updates)
    for epoch in range(1, epochs):
        entropy = numpy.random.SeedSequence([seed, step, epoch])
        order = numpy.random.Generator(numpy.random.PCG64(entropy)).permutation(len(updates))
        found += [updates[i] for i in order]
    return found


def of_last_epoch(found: Sequence[Sums], *, epochs: int) -> Sums:
    """Return the metrics of the last of several epochs that show how far the policy has moved.

    Args:
        found: sums of each update, epoch after epoch.
    Returns: policy/kl_old_last and policy/clip_frac_last, where the loss reports them; {} for one
        epoch, and for the other models.
    """
    if epochs == 1:
        return {}
    # Every epoch has the same number of updates.
    last = add_sums(*found[-(len(found) // epochs) :])
    return {f"{name}_last": last[name] for name in _AT_THE_END if name in last}
