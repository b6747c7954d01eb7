"""What a step came to, as fingerprints: each trainer rank adds its share, all know the whole."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from spmdrl.certificate.fingerprints import Tally
from spmdrl.checkpoint.state import tensor_leaves
from spmdrl.model.cuts import TensorCut, cut_of
from spmdrl.model.shards import local_part
from spmdrl.types import TOKEN_COLUMNS, Advantages, Batch, Sums
from spmdrl.world import World
from spmdrl.world.torch_internals import sharded_like

SECTIONS = (
    "before",
    "rollouts",
    "plan",
    "columns",
    "advantages",
    "losses",
    "gradients",
    "norms",
    "after",
)
"""Of what a step came to, in the order in which the one follows from the other. `before` and
`after`: all that a checkpoint would hold of the policy before the update, of everything after it.
"""


class Witness:
    """Watches the steps of one trainer.

    Args:
        world: of a trainer rank.
        trainer: what is watched.
        is_due: says of which steps `content` will be asked.
    """

    def __init__(self, world: World, trainer: Any, *, is_due: Callable[[int], bool]):
        self._world, self._trainer, self._is_due = world, trainer, is_due
        self._tally = Tally(world)
        trainer.policy.on_gradients = self._see

    def _see(self, gradients: Mapping[str, Tensor], *, step: int, number: int) -> None:
        """Add the gradients of one update, before they are clipped; and what it begins from."""
        if not self._is_due(step):
            return
        policy = self._trainer.policy
        if number == 0:
            self._tally = Tally(self._world)  # the last step's may have ended in an error
            self._add_state(policy.state_dict(), "before", is_near=False)
        for name, parameter in policy.optimizer.parameters.items():
            own = gradients.get(name, torch.zeros_like(local_part(parameter)))
            is_cut = isinstance(parameter, DTensor)
            whole = sharded_like(parameter, own.detach()) if is_cut else own
            self._tally.add({f"gradients/{name}": whole}, number=number)

    def _add_state(self, state: dict[str, Any], section: str, *, is_near: bool = True) -> None:
        alike: dict[tuple[str, TensorCut], dict[str, Tensor]] = defaultdict(dict)
        for name, tensor in tensor_leaves(state).items():
            alike[_of_parameter(name), cut_of(name, tensor)][f"{section}/{name}"] = tensor
        for tensors in alike.values():
            self._tally.add(tensors, is_near=is_near)

    def content(
        self, step: int, batch: Batch, advantages: Advantages, updated: Sums
    ) -> dict[str, Any]:
        """Return what a step came to, by section and name; trainers meet.

        Args:
            batch: annotated.
            updated: what the update returned.
        """
        self._add_batch(batch, advantages)
        self._add_state(self._trainer.state_dict(), "after")
        tally, self._tally = self._tally, Tally(self._world)
        with self._world.watch.wait("certificate", step):
            rows, differing = tally.total()
        found: dict[str, Any] = {section: {} for section in SECTIONS}
        for name, row in rows.items():
            section, _, own = name.partition("/")
            found[section][own] = str(row[0])[:16] if section == "before" else row
        for section, end in (("losses", "/loss"), ("norms", "/grad_norm")):
            found[section] = {
                name: float(sums[0]) if math.isfinite(sums[0]) else str(sums[0])
                for name, sums in updated.items()
                if name.endswith(end)
            }
        found["plan"]["tokens_per_microbatch"] = self._world.tokens_per_microbatch
        return found | ({"differing_copies": differing} if differing else {})

    def _add_batch(self, batch: Batch, advantages: Advantages) -> None:
        tally, scalars = self._tally, vars(batch.scalars)
        for name, values in {**scalars, "update_ids": batch.update_ids}.items():
            section = "plan" if name == "update_ids" else "rollouts"
            tally.add({f"{section}/{name}": values})
        for update, microbatches in enumerate(batch.updates):
            for number, one in enumerate(microbatches):
                columns = {f"rollouts/{name}": getattr(one, name) for name in TOKEN_COLUMNS}
                if one.routes is not None:
                    columns["rollouts/routes"] = one.routes
                own = batch.columns[update][number] if batch.columns else {}
                columns |= {f"columns/{name}": column for name, column in own.items()}
                own = advantages.columns(update, number)
                columns |= {f"advantages/{name}": column for name, column in own.items()}
                ids, starts = one.sequence_ids, one.cu_seqlens
                tally.add_tokens(columns, sequences=ids, starts=starts)
                at = torch.arange(len(ids), device=ids.device)
                place = ((self._world.dp_index(self._world.rank) << 8) + update << 16) + number
                tally.add_tokens(
                    {"plan/microbatches": (place << 24) + at},
                    sequences=ids,
                    starts=torch.arange(len(ids) + 1, device=ids.device),
                )


def _of_parameter(name: str) -> str:
    """Return the parameter that a tensor of the policy's state belongs to; of others their name."""
    kind, _, rest = name.partition(".")
    return {"model": rest, "optimizer": rest.partition(".")[2]}.get(kind) or name
