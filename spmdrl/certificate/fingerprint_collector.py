"""The fingerprints of a step: each trainer rank adds its share, and all get the sums."""

from __future__ import annotations

import base64
import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from spmdrl.certificate.fingerprints import Tally, TensorGroup, by_size
from spmdrl.checkpoint.state import tensor_leaves
from spmdrl.columns import RouterRoutes
from spmdrl.model.tensor_parts import local_part
from spmdrl.types import TOKEN_COLUMNS, Advantages, Batch, Sums
from spmdrl.world.torch_internals import sharded_like
from spmdrl.world.world import World

if TYPE_CHECKING:
    from spmdrl.train.trained_model import TrainedModel

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
"""Sections of a step's line, each cause before its effects. `before` has the policy's
weights, with its optimizer if a step takes several updates; `after` has all tensors that a
checkpoint has."""
SEQUENCES = {
    "tokens": "rollouts/tokens",
    "rollout_logprobs": "rollouts/rollout_logprobs",
    "advantages": "advantages/advantages",
}
"""{name in a line's `sequences`: column}. There each sequence has its own digest of these columns,
and its reward, group and sample."""


class State:
    """The tensors of a state on this rank, collected once and read at every step.

    Building a state dict takes longer than reading its tensors. So tensors that share live storage
    are held, as the optimizer holds them; the state is built again only for those that are copies.

    Args:
        read: returns the state, nested by name.
        section: of the line; names are `section/name`.
    """

    def __init__(
        self, read: Callable[[], dict[str, Any]], world: World, *, section: str, is_near: bool
    ):
        self._read = read
        self._world = world
        self._section = section
        self._is_near = is_near
        self._live: list[tuple[TensorGroup, list[Tensor]]] | None = None
        self._copies: list[str] = []

    def add_to(self, tally: Tally) -> None:
        """Add all tensors."""
        if self._live is None:
            first = tensor_leaves(self._read())
            second = tensor_leaves(self._read())
            # Both are alive, so a copy in one has another address than that in the other.
            self._copies = [name for name in first if not _shares(first[name], second[name])]
            live = {name: own for name, own in first.items() if name not in self._copies}
            self._live = self._groups(live)
        now = tensor_leaves(self._read()) if self._copies else {}
        copies = self._groups({name: now[name] for name in self._copies})
        for group, locals_ in [*self._live, *copies]:
            tally.add(group, locals_)

    def _groups(self, tensors: Mapping[str, Tensor]) -> list[tuple[TensorGroup, list[Tensor]]]:
        return [
            (
                TensorGroup(
                    {f"{self._section}/{name}": tensor for name, tensor in own.items()},
                    self._world,
                    is_near=self._is_near,
                ),
                [local_part(tensor) for tensor in own.values()],
            )
            for own in by_size(tensors)
        ]


def _shares(one: Tensor, other: Tensor) -> bool:
    return local_part(one).data_ptr() == local_part(other).data_ptr()


class FingerprintCollector:
    """Collects the fingerprints of the steps of one trainer.

    Args:
        world: of a trainer rank.
        trainer: whose policy calls back with its gradients.
        is_due: whether `content` will be called for a step.
        is_near: whether the step's line has norms, by which layouts are compared.
    """

    def __init__(
        self,
        world: World,
        trainer: Any,
        *,
        is_due: Callable[[int], bool],
        is_near: Callable[[int], bool],
    ):
        self._world = world
        self._is_due = is_due
        self._is_near = is_near
        self._optimizer = trainer.policy.optimizer
        policy = trainer.policy
        # After one update a changed moment shows in `after`; of several updates only `before` tells
        # where the change began.
        takes_several = trainer.cfg.batch.optimizer_steps > 1
        begins = policy.state_dict if takes_several else partial(_weights, policy)
        self._before = State(begins, world, section="before", is_near=False)
        self._after = State(trainer.state_dict, world, section="after", is_near=True)
        self._shapes: tuple = ()
        self._plain: list[TensorGroup] = []
        self._groups: dict[tuple[int, ...], list[TensorGroup]] = {}
        self._tally = Tally(world, is_near=False)
        trainer.policy.on_gradients = self._see

    def _see(self, gradients: Mapping[str, Tensor], *, step: int, number: int) -> None:
        """Add the gradients of one update, before they are clipped; and the state before it."""
        if not self._is_due(step):
            return
        if number == 0:  # a step that ended in an error may have left its tally
            self._tally = Tally(self._world, is_near=self._is_near(step))
            self._before.add_to(self._tally)
        for group, locals_ in self._of_gradients(gradients):
            self._tally.add(group, locals_, number=number)

    def _of_gradients(
        self, gradients: Mapping[str, Tensor]
    ) -> Iterator[tuple[TensorGroup, list[Tensor]]]:
        """Yield all gradients in their groups; zeros for a parameter without a gradient."""
        parameters = self._optimizer.parameters
        own = {
            name: gradients[name].detach()
            if name in gradients
            else torch.zeros_like(local_part(parameter))
            for name, parameter in parameters.items()
        }
        sizes = tuple(gradient.element_size() for gradient in own.values())
        if sizes not in self._groups:
            like = {
                f"gradients/{name}": sharded_like(parameter, own[name])
                if isinstance(parameter, DTensor)
                else own[name]
                for name, parameter in parameters.items()
            }
            self._groups[sizes] = [TensorGroup(some, self._world) for some in by_size(like)]
        for group in self._groups[sizes]:
            yield group, [own[name.removeprefix("gradients/")] for name in group.names]

    def content(
        self, step: int, batch: Batch, advantages: Advantages, updated: Sums
    ) -> dict[str, Any]:
        """Return a step's fingerprints and numbers, by section and name; trainers meet.

        Args:
            batch: annotated.
            updated: sums that the update returned.
        """
        self._add_batch(batch, advantages)
        self._after.add_to(self._tally)
        tally = self._tally
        # Not left to `_see`, which is not called in critic.warmup_steps: no update of the policy.
        self._tally = Tally(self._world, is_near=False)
        with self._world.watch.wait("certificate", step):
            totals = tally.total()
        found: dict[str, Any] = {section: {} for section in SECTIONS}
        for name in sorted(totals.rows, key=_place_in_line):
            section, _, own = name.partition("/")
            found[section][own] = totals.rows[name]
        # JSON has no inf and nan, so these are written as text.
        for section, end in (("losses", "/loss"), ("norms", "/grad_norm")):
            found[section] = {
                name: float(sums[0]) if math.isfinite(sums[0]) else str(sums[0])
                for name, sums in updated.items()
                if name.endswith(end)
            }
        found["plan"]["tokens_per_microbatch"] = self._world.tokens_per_microbatch
        found["sequences"] = {
            name: packed(totals.sequences[column])
            for name, column in SEQUENCES.items()
            if column in totals.sequences
        }
        found["sequences"] |= _identified(batch)
        return found | ({"differing_copies": totals.differing} if totals.differing else {})

    def _add_batch(self, batch: Batch, advantages: Advantages) -> None:
        tally = self._tally
        scalars = vars(batch.scalars)
        plain = {f"rollouts/{name}": values for name, values in scalars.items()}
        plain |= {"plan/update_ids": batch.update_ids}
        shapes = tuple((name, values.shape, values.dtype) for name, values in plain.items())
        if shapes != self._shapes:
            self._shapes = shapes
            self._plain = [TensorGroup(some, self._world) for some in by_size(plain)]
        for group in self._plain:
            tally.add(group, [plain[name] for name in group.names])
        for update, microbatches in enumerate(batch.updates):
            for number, one in enumerate(microbatches):
                columns = {f"rollouts/{name}": getattr(one, name) for name in TOKEN_COLUMNS}
                if (routes := RouterRoutes.of(one.extra_columns)) is not None:
                    columns["rollouts/routes"] = routes.rows
                own = batch.columns[update][number] if batch.columns else {}
                columns |= {f"columns/{name}": column for name, column in own.items()}
                own = advantages.columns(update, number)
                columns |= {f"advantages/{name}": column for name, column in own.items()}
                tally.add_tokens(
                    columns,
                    sequences=one.sequence_ids,
                    starts=one.cu_seqlens,
                    kept=SEQUENCES.values(),
                    count=len(batch.scalars),
                )
                own_place = (self._world.dp_index(self._world.rank), update, number)
                places = _places(own_place, like=one.sequence_ids)
                tally.add_tokens(
                    {"plan/microbatches": places},
                    sequences=one.sequence_ids,
                    starts=torch.arange(len(places) + 1, device=places.device),
                )


def _places(microbatch: tuple[int, int, int], *, like: Tensor) -> Tensor:
    """Return [S, 4] int64: which rank computes each sequence, when, and with which others.

    Args:
        microbatch: its dp index, update, and number in the update.
        like: [S] int64, its sequences.
    """
    whole = torch.tensor(microbatch, device=like.device).expand(len(like), -1)
    return torch.cat([whole, torch.arange(len(like), device=like.device)[:, None]], dim=1)


def _weights(policy: TrainedModel) -> dict[str, Any]:
    return {"model": policy.model.state_dict()}


def _place_in_line(name: str) -> int:
    """Return the sort key of a name within its section. Causes come before their effects; other
    names keep the order in which they were added."""
    order = [f"rollouts/{own}" for own in (*TOKEN_COLUMNS, "routes", "lengths", "rewards")]
    if name in order:
        return order.index(name)
    # A moment that was changed since the step before shows first, then in its weight.
    return len(order) + (not name.startswith("after/optimizer."))


def _identified(batch: Batch) -> dict[str, Any]:
    """Return each sequence's reward, group and sample; the size alone if all groups are whole."""
    scalars = batch.scalars
    at = torch.arange(len(batch.scalars))
    groups = scalars.group_ids.cpu()
    samples = scalars.sample_ids.cpu()
    size = int(samples.max()) + 1 if len(at) else 1
    is_whole = torch.equal(groups, at // size) and torch.equal(samples, at % size)
    ids: dict[str, Any] = {"group_size": size}
    if not is_whole:
        ids = {"groups": packed(groups.int()), "samples": packed(samples.int())}
    return {"rewards": packed(scalars.rewards.double()), **ids}


def packed(values: Tensor) -> str:
    """Return the bytes of numbers, little-endian, in base64."""
    return base64.b64encode(values.cpu().contiguous().numpy().tobytes()).decode()
