"""The trainer of this rank: a Trainer on trainer ranks, a NullTrainer on the others.

A rank that does not train imports nothing of spmdrl.train.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any

from spmdrl.config import Config
from spmdrl.model.load import build_meta_model
from spmdrl.model.sharded_model import SentWeights
from spmdrl.types import Batch
from spmdrl.world.comm import agree, gather_objects
from spmdrl.world.microbatch_tokens import agree_on_tokens
from spmdrl.world.world import World

if TYPE_CHECKING:
    from spmdrl.train.trainer import Trainer


log = logging.getLogger(__name__)


class NullTrainer:
    """The trainer on a rank that does not train, so that every rank runs the same loop.

    Its methods do nothing but take part in collectives of all ranks.

    Args:
        weights: names of the tensors that trainers send.
    """

    def __init__(self, world: World, *, weights: SentWeights):
        self.world = world
        self.weights = weights

    def size_microbatches(self) -> None:
        """Receive the size of a micro-batch from the trainers."""
        agree_on_tokens(self.world, None)

    def _nothing(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        """Return {}: this rank has no state, no scores and no metrics."""
        return {}

    joined = check_packing = state_dict = scores = update = watch_logprobs = _nothing

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Do nothing."""

    def annotate(self, batch: Batch, *, step: int) -> Batch:
        """Return the batch unchanged."""
        return batch


def make_trainer(
    cfg: Config,
    world: World,
    *,
    loss_fn: Callable[..., Any] | None = None,
    advantage_fn: Callable[..., Any] | None = None,
    columns: Collection[str] = (),
) -> Trainer | NullTrainer:
    """Return the trainer of this rank; every rank calls it.

    Args:
        loss_fn, advantage_fn, columns: see Trainer; by default the config's methods.
    Raises: Refusal, on all ranks together, when a model cannot be loaded or laid out.
    """
    trainer: Trainer | NullTrainer
    with agree(group=world.control, waiting=world.watch.wait("load the policy", -1)):
        hf_model = build_meta_model(cfg.model, is_scalar=cfg.objective.is_scalar)
        weights = SentWeights(hf_model, cfg.model.lora, train=cfg.model.train)
        if world.is_trainer:
            from spmdrl.train.trainer import Trainer

            trainer = Trainer(
                cfg,
                world,
                hf_model=hf_model,
                weights=weights,
                loss_fn=loss_fn,
                advantage_fn=advantage_fn,
                columns=columns,
            )
        else:
            trainer = NullTrainer(world, weights=weights)
    trainer.joined()
    if cfg.batch.share_prefixes == "auto":
        _agree_on_prefixes(world)
    return trainer


def _agree_on_prefixes(world: World) -> None:
    """Tell every rank which models of the trainers cannot share prefixes."""
    with world.watch.wait("agree on prefixes", -1):
        found = gather_objects(world.unshared, group=world.control)
    world.unshared = found[world.trainer_ranks[0]]
    if world.rank == 0:
        for path, why in world.unshared.items():
            log.info("prefixes are not shared (batch.share_prefixes auto): %s: %s", path, why)
