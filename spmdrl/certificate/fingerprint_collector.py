"""Collect the fingerprints of a step: each trainer rank adds its share, and all get the sums."""

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
from spmdrl.checkpoint.state import leaves
from spmdrl.columns import RouterRoutes
from spmdrl.model.tensor_parts import BlockValues, local_part
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
"""Sections of a step's line, each cause before its effects. `before` has the weights of the policy,
and its optimizer state if a step takes several updates. `after` has all tensors of a checkpoint."""
SEQUENCES = {
    "tokens": "rollouts/tokens",
    "rollout_logprobs": "rollouts/rollout_logprobs",
    "advantages": "advantages/advantages",
}
"""{name in a line's `sequences`: column}. For each sequence, a line has the digests of these
columns, the reward, the group and the sample."""


class State:
    """The tensors of a state on this rank, collected once and read at every step.

    Building a state dict takes longer than reading its tensors. So this keeps references to the
    tensors that share live storage. The state dict is built again only if some tensors are copies.

    Args:
        read: returns the state, nested by name.
        section: of the line; names are `section/name`.
    """

    def __init__(
        self, read: Callable[[], dict[str, Any]], world: World, *, section: str, with_norms: bool
    ):
        self._read = read
        self._world = world
        self._section = section
        self._with_norms = with_norms
        self._live: list[tuple[TensorGroup, list[Tensor]]] | None = None
        self._blocks: dict[str, BlockValues] = {}
        self._copies: list[str] = []

    def add_to(self, tally: Tally) -> None:
        """Add all tensors."""
        if self._live is None:
            first, blocks = self._parts()
            second, _ = self._parts()
            # Both states are alive, so the copies of a tensor have different addresses in them.
            self._copies = [name for name in first if not _shares(first[name], second[name])]
            live = {name: own for name, own in first.items() if name not in self._copies}
            self._live = self._groups(live)
            self._blocks = blocks
        now = self._parts()[0] if self._copies else {}
        copies = self._groups({name: now[name] for name in self._copies})
        for group, locals_ in [*self._live, *copies]:
            tally.add(group, locals_)
        for name, own in self._blocks.items():
            tally.add_blocks(f"{self._section}/{name}", own, with_norms=self._with_norms)

    def _parts(self) -> tuple[dict[str, Tensor], dict[str, BlockValues]]:
        found = leaves(self._read())
        blocks = {name: own for name, own in found.items() if isinstance(own, BlockValues)}
        return {name: own for name, own in found.items() if isinstance(own, Tensor)}, blocks

    def _groups(self, tensors: Mapping[str, Tensor]) -> list[tuple[TensorGroup, list[Tensor]]]:
        return [
            (
                TensorGroup(
                    {f"{self._section}/{name}": tensor for name, tensor in own.items()},
                    self._world,
                    with_norms=self._with_norms,
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
        trainer: its policy calls back with the gradients.
        is_due: returns whether `content` will be called for a step.
        with_norms: returns whether the step's line has norms, which comparing two layouts needs.
    """

    def __init__(
        self,
        world: World,
        trainer: Any,
        *,
        is_due: Callable[[int], bool],
        with_norms: Callable[[int], bool],
    ):
        self._world = world
        self._is_due = is_due
        self._with_norms = with_norms
        self._optimizer = trainer.policy.optimizer
        policy = trainer.policy
        # With one update per step, `after` shows a changed moment. With several, `before` is needed
        # to see in which step the change began.
        has_several_updates = trainer.cfg.batch.optimizer_steps > 1
        read = policy.state_dict if has_several_updates else partial(_weights, policy)
        self._before = State(read, world, section="before", with_norms=False)
        self._after = State(trainer.state_dict, world, section="after", with_norms=True)
        self._shapes: tuple = ()
        self._plain: list[TensorGroup] = []
        self._groups: dict[tuple[int, ...], list[TensorGroup]] = {}
        self._tally = Tally(world, with_norms=False)
        trainer.policy.on_gradients = self._add_update

    def _add_update(self, gradients: Mapping[str, Tensor], *, step: int, number: int) -> None:
        """Add the gradients of one update, before they are clipped.

        Before the gradients of the first update, add the section `before`.
        """
        if not self._is_due(step):
            return
        if number == 0:  # a new tally, because a step that ended in an error may have left one
            self._tally = Tally(self._world, with_norms=self._with_norms(step))
            self._before.add_to(self._tally)
        for group, locals_ in self._of_gradients(gradients):
            self._tally.add(group, locals_, number=number)

    def _of_gradients(
        self, gradients: Mapping[str, Tensor]
    ) -> Iterator[tuple[TensorGroup, list[Tensor]]]:
        """Yield all gradients in their groups, with zeros for parameters without a gradient."""
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
        """Return a step's fingerprints and numbers, by section and name. All trainers must call it.

        Args:
            batch: with its columns.
            updated: sums that the update returned.
        """
        self._add_batch(batch, advantages)
        self._after.add_to(self._tally)
        tally = self._tally
        # `_add_update` also makes a new tally, but is not called during critic.warmup_steps.
        self._tally = Tally(self._world, with_norms=False)
        with self._world.watch.wait("certificate", step):
            totals = tally.total()
        found: dict[str, Any] = {section: {} for section in SECTIONS}
        for name in sorted(totals.rows, key=_sort_key):
            section, _, own = name.partition("/")
            found[section][own] = totals.rows[name]
        # JSON has no inf and nan, so write these as text.
        for section, end in (("losses", "/loss"), ("norms", "/grad_norm")):
            found[section] = {
                name: float(sums[0]) if math.isfinite(sums[0]) else str(sums[0])
                for name, sums in updated.items()
                if name.endswith(end)
            }
        found["plan"]["tokens_per_microbatch"] = self._world.tokens_per_microbatch
        found["sequences"] = {
            name: to_base64(totals.sequences[column])
            for name, column in SEQUENCES.items()
            if column in totals.sequences
        }
        found["sequences"] |= _sequence_ids(batch)
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
                    per_sequence=SEQUENCES.values(),
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


def _sort_key(name: str) -> int:
    """Return the sort key of a name within its section: causes before their effects.

    Names with the same key keep the order in which they were added.
    """
    order = [f"rollouts/{own}" for own in (*TOKEN_COLUMNS, "routes", "lengths", "rewards")]
    if name in order:
        return order.index(name)
    # A change of a moment since the previous step is the cause of a change of its weight.
    return len(order) + (not name.startswith("after/optimizer."))


def _sequence_ids(batch: Batch) -> dict[str, Any]:
    """Return each sequence's reward, group, sample and trace, as in a line.

    If all groups are whole, the group size stands for groups and samples. Without numbers of
    traces, each sequence is an episode.
    """
    scalars = batch.scalars
    at = torch.arange(len(batch.scalars))
    groups = scalars.group_ids.cpu()
    samples = scalars.sample_ids.cpu()
    size = int(samples.max()) + 1 if len(at) else 1
    is_whole = torch.equal(groups, at // size) and torch.equal(samples, at % size)
    ids: dict[str, Any] = {"group_size": size}
    if not is_whole:
        ids = {"groups": to_base64(groups.int()), "samples": to_base64(samples.int())}
    if scalars.traces.any():
        ids["traces"] = to_base64(scalars.traces.int())
    return {"rewards": to_base64(scalars.rewards.double()), **ids}


def to_base64(values: Tensor) -> str:
    """Return the bytes of numbers, little-endian, in base64."""
    return base64.b64encode(values.cpu().contiguous().numpy().tobytes()).decode()
