"""A sharded model with its optimizer: micro-batches in, one optimizer step out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from spmdrl.config import Config, OptimizerSettings
from spmdrl.model.parallel.recompute import check_offload, has
from spmdrl.model.sharded import ShardedModel
from spmdrl.train.objectives.rl import Job, Stats
from spmdrl.train.optimizer import AdamW, copies, learning_rate, square_sum
from spmdrl.train.router_balance import Routers
from spmdrl.train.step import Outcome, Totals, clip_gradients, dump_skipped, exchange_totals
from spmdrl.types import Sums
from spmdrl.world import World

LossOf = Callable[[Job], tuple[Tensor, Stats]]
"""One micro-batch's share of the loss, a [] tensor with a graph, and its metrics."""


class TrainedModel:
    """Trains one sharded model, on the trainer ranks.

    Args:
        model: with trainable parameters.
        cfg, world: the config and this rank's view of the job.
        options: of the optimizer.
        name: first part of the metrics' names: `policy`, `value` or `prm`.
    Raises: ValueError when model.memory.offload asks for what this device cannot do.
    """

    def __init__(
        self,
        model: ShardedModel,
        *,
        cfg: Config,
        world: World,
        options: OptimizerSettings,
        name: str = "policy",
    ):
        self.model, self.cfg, self.world, self.options = model, cfg, world, options
        self.name = name
        shards = {name: p for name, p in model.named_shards().items() if p.requires_grad}
        embedding = model.hf_model.get_input_embeddings().weight
        kept = cfg.model.memory
        check_offload(kept.offload, world.device)
        self.optimizer = AdamW(
            shards,
            options=options,
            no_decay={name for name, p in shards.items() if p is embedding},
            dtype=getattr(torch, kept.optimizer_dtype),
            key=f"{cfg.seed}/{name}",
            is_on_host=has(kept.offload, "optimizer"),
            device=world.device,
        )
        self.routers = Routers(
            model.hf_model, scorer=model.scorer, options=cfg.model.moe, world=world, name=name
        )
        self._reduces_last = kept.reduce == "last"
        trainers = len(world.trainer_ranks)
        self._copies = {name: copies(p, num_trainers=trainers) for name, p in shards.items()}
        # FSDP2 averages gradients over these ranks; the loss is a sum.
        self._averaged = world.mesh.size() // world.mesh["tp"].size()

    def take_step(self, jobs: Sequence[Job], loss_of: LossOf, *, step: int, number: int) -> Sums:
        """Run all micro-batches of one update and move the parameters.

        An update whose loss or gradient norm is not finite is skipped on all ranks together,
        counted, and its micro-batches are saved under output_dir/skipped (skipped_value).

        Args:
            jobs: this rank's micro-batches; every trainer rank has equally many.
            loss_of: called once per job, in order.
            step: training step, for the schedule. number: of the update within the step.
        Returns: sums over all trainer ranks, equal on each of them.
        """
        totals = self._accumulate(jobs, loss_of)
        gradients = self.optimizer.gradients()
        self.model.complete(gradients)
        outcome = exchange_totals(totals, square_sum(gradients, self._copies), world=self.world)
        lr = learning_rate(self.options, step, steps=self.cfg.steps)
        if outcome.is_finite:
            clip_gradients(
                list(gradients.values()),
                norm=outcome.grad_norm,
                max_norm=self.options.max_grad_norm,
            )
            self.optimizer.step(gradients, lr=lr)
        else:
            folder = "skipped" if self.name == "policy" else f"skipped_{self.name}"
            dump_skipped(
                jobs,
                outcome,
                folder=Path(self.cfg.output_dir) / folder,
                step=step,
                update=number,
                rank=self.world.rank,
            )
        self.optimizer.zero_grad()
        routed = self.routers.finish(is_taken=outcome.is_finite)
        return self._sums(outcome, lr=lr, is_first=number == 0) | routed

    def _accumulate(self, jobs: Sequence[Job], loss_of: LossOf) -> Totals:
        """Run all micro-batches forward and backward; gradients add up in the parameters."""
        totals = Totals()
        self.routers.prepare(jobs, loss_of)
        for index, job in enumerate(jobs):
            self._reduce(is_last=index == len(jobs) - 1)
            with self.routers.watching(job):
                loss, stats = loss_of(job)
            ((loss + self.routers.take()) * self._averaged).backward()
            totals.add(job, loss, stats)
        return totals

    def _reduce(self, *, is_last: bool) -> None:
        """Say whether FSDP2 reduces the gradients of the next backward pass, over shards and over
        copies of them: the latter in the last one, where all is added up."""
        if self._reduces_last:
            self.model.scorer.set_requires_gradient_sync(is_last)
        else:
            self.model.scorer.set_requires_all_reduce(is_last)

    def rehearse(self, jobs: Sequence[Job], loss_of: LossOf) -> None:
        """Run micro-batches as `take_step` does, and drop gradients and metrics: nothing of the
        model, its optimizer and its routers is changed."""
        self._accumulate(jobs, loss_of)
        self.optimizer.zero_grad()
        self.routers.finish(is_taken=False)

    def state_dict(self) -> dict[str, object]:
        """Return model and optimizer state as nested dicts of DTensors that share live storage.

        Names are the model's own for its parameters. Loading into the tensors in place restores
        them up to the optimizer's update count, which `load_state_dict` sets.
        """
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Restore what `state_dict` returned, after it was loaded onto this layout."""
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])

    def _sums(self, outcome: Outcome, *, lr: float, is_first: bool) -> Sums:
        once = float(is_first)  # the denominator of what is a total over the step's updates
        is_finite, name = outcome.is_finite, self.name
        sums: Sums = {
            f"{name}/lr": (lr, 1.0),
            f"{name}/skipped_updates": (float(not is_finite), once),
        }
        if name == "policy":
            trained = outcome.num_tokens if is_finite else 0.0
            sums["perf/trained_tokens"] = (trained, once)
        if not is_finite:
            return sums
        return (
            outcome.stats
            | sums
            | {f"{name}/loss": (outcome.loss, 1.0), f"{name}/grad_norm": (outcome.grad_norm, 1.0)}
        )
