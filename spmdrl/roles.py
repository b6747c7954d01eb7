"""What the trainer is on this rank: the real one where it trains, and where not a bystander, which
loads nothing of spmdrl.train."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any

from spmdrl.config import Config
from spmdrl.model.load import build_meta_model
from spmdrl.model.sharded import SentWeights
from spmdrl.types import Batch
from spmdrl.world.comm import agree
from spmdrl.world.found_microbatch_size import agree_on_tokens
from spmdrl.world.world import World

if TYPE_CHECKING:
    from spmdrl.train.trainer import Trainer


class Bystander:
    """Stand where the trainer does, on a rank that does not train: every call does nothing, but
    for those that all ranks make together.

    Args:
        weights: names of what trainers send.
    """

    def __init__(self, world: World, *, weights: SentWeights):
        self.world, self.weights = world, weights

    def size_microbatches(self) -> None:
        """Learn what trainers find for the size of a micro-batch."""
        agree_on_tokens(self.world, None)

    def _nothing(self, *given: Any, **named: Any) -> dict[Any, Any]:
        """Return {}: trainers keep, and measure, what there is."""
        return {}

    joined = check_agreement = state_dict = scores = update = _nothing

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Do nothing."""

    def annotate(self, batch: Batch, *, step: int) -> Batch:
        """Return the batch as it is."""
        return batch


def make_trainer(
    cfg: Config,
    world: World,
    *,
    loss_fn: Callable[..., Any] | None = None,
    advantage_fn: Callable[..., Any] | None = None,
    columns: Collection[str] = (),
) -> Trainer | Bystander:
    """Return the trainer of this rank; every rank calls it.

    Args:
        loss_fn, advantage_fn, columns: see Trainer; the first two of the config by default.
    Raises: Refusal, on all ranks together, when a model cannot be loaded or laid out.
    """
    trainer: Trainer | Bystander
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
            trainer = Bystander(world, weights=weights)
    trainer.joined()
    return trainer
