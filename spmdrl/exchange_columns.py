"""How columns that only some runs have travel with their tokens: routes, sampling masks, items.

A column adds numbers to what is sent of each token, or sends what it has the way of the tokens, or
both. What all ranks need to know of it beforehand is gathered with the scalars. Letters: T tokens
of this rank, S sequences of the batch, P items of the batch, R ranks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from spmdrl.model_inputs import MultimodalItem, MultimodalItems
from spmdrl.sampling_masks import SamplingMasks
from spmdrl.types import Tokens
from spmdrl.world.world import World

Column = TypeVar("Column")


@dataclass(frozen=True)
class Passage:
    """Which rows go to each rank, and come from it, in order."""

    world: World
    leaving: Sequence[int]  # [R], rows
    arriving: Sequence[int]  # [R], rows
    dp_of_rank: Sequence[int]  # [R], -1 off the trainers
    dp_ids: Tensor  # [S] int64, dp index that trains on the sequence

    def moved(self, payload: Tensor) -> Tensor:
        """Send rows, and return those that came, on world.device."""
        payload = payload.to(self.world.wire)
        received = payload.new_empty(sum(self.arriving), *payload.shape[1:])
        dist.all_to_all_single(received, payload, [*self.arriving], [*self.leaving])
        return received.to(self.world.device)


class Traveller(ABC, Generic[Column]):
    """How one column travels; made alike on all ranks, if any of them has the column."""

    @staticmethod
    @abstractmethod
    def told(own: Column, lengths: Tensor) -> Any:
        """Return what the others need to know of a rank's column, plain; None for nothing.

        Args:
            lengths: of the rank's sequences, [N] int64 tokens.
        """

    @classmethod
    @abstractmethod
    def agreed(cls, told: Mapping[int, Any], rows: Sequence[Tensor]) -> Traveller[Column]:
        """Return how the column travels.

        Args:
            told: what ranks that have it told, at least one.
            rows: of every rank, its sequences' rows among the batch's: [N] int64.
        """

    @abstractmethod
    def none(self, count: int) -> Column:
        """Return the column of `count` tokens of which nothing is known."""

    def of_dummy(self) -> Column | None:
        """Return the column of a micro-batch without sequences, of one token."""
        return None

    def numbers(self, own: Column) -> list[Tensor]:
        """Return what goes with each token: [T] int32 each."""
        return []

    @abstractmethod
    def moved(self, own: Column, numbers: Sequence[Tensor], passage: Passage) -> Column:
        """Send what tokens have, and return that of those which came.

        Args:
            own: of the tokens that leave, in their order.
            numbers: that came with the others.
        """

    def work(self, num_sequences: int) -> Tensor | None:
        """Return what training costs for it, [S] int64 as many tokens; None for nothing."""
        return None


@dataclass(frozen=True)
class _RouteRows(Traveller[Tensor]):
    """Rows of one size."""

    form: Tensor  # [0, L, K], of the dtype that all have

    @staticmethod
    def told(own: Tensor, lengths: Tensor) -> Any:
        return own[:0]

    @classmethod
    def agreed(cls, told: Mapping[int, Any], rows: Sequence[Tensor]) -> _RouteRows:
        return cls(next(iter(told.values())))

    def none(self, count: int) -> Tensor:  # as of samples begun before replay was switched on
        return self.form.new_full((count, *self.form.shape[1:]), -1)

    def moved(self, own: Tensor, numbers: Sequence[Tensor], passage: Passage) -> Tensor:
        received = passage.moved(own.flatten(1).contiguous().view(torch.uint8))
        return received.view(self.form.dtype).unflatten(1, self.form.shape[1:])


@dataclass(frozen=True)
class _SamplingMaskBytes(Traveller[SamplingMasks]):
    """Bytes, as many as each token's number says."""

    vocab: int

    @staticmethod
    def told(own: SamplingMasks, lengths: Tensor) -> Any:
        return own.vocab

    @classmethod
    def agreed(cls, told: Mapping[int, Any], rows: Sequence[Tensor]) -> _SamplingMaskBytes:
        return cls(max(told.values()))

    def none(self, count: int) -> SamplingMasks:
        sizes = torch.zeros(count, dtype=torch.int32)
        return SamplingMasks(self.vocab, sizes, torch.empty(0, dtype=torch.uint8))

    def numbers(self, own: SamplingMasks) -> list[Tensor]:
        return [own.sizes]

    def moved(
        self, own: SamplingMasks, numbers: Sequence[Tensor], passage: Passage
    ) -> SamplingMasks:
        arriving = numbers[0].contiguous()
        of_bytes = replace(
            passage,
            leaving=[int(part.sum()) for part in own.sizes.split([*passage.leaving])],
            arriving=[int(part.sum()) for part in arriving.cpu().split([*passage.arriving])],
        )
        return SamplingMasks(self.vocab, arriving, of_bytes.moved(own.data))


@dataclass(frozen=True)
class _ItemFeatures(Traveller[MultimodalItems]):
    """Places among the items of the whole batch; and each item once to each rank that trains
    on a sequence which shows it, from the first rank that has it."""

    items: tuple[MultimodalItem, ...]
    """[P], on the meta device: of what shapes they are."""
    holders: Tensor  # [P] int64, the rank that sends it
    rows: Tensor  # [n] int64, a sequence among S, and
    multimodal: Tensor  # [n] int64, an item among P that it shows; no pair twice

    @staticmethod
    def told(own: MultimodalItems, lengths: Tensor) -> Any:
        if not own.items:
            return None
        is_placeholder = own.places >= 0
        sequences = torch.arange(len(lengths)).repeat_interleave(lengths)[is_placeholder]
        which = torch.bucketize(own.places[is_placeholder], own.starts[1:], right=True)
        used, which = which.unique(return_inverse=True)
        pairs = torch.stack([sequences, which]).unique(dim=1)
        forms = [
            (p.key, p.num_tokens, {k: (v.dtype, tuple(v.shape)) for k, v in p.features.items()})
            for p in (own.items[i] for i in used.tolist())
        ]
        return forms, pairs

    @classmethod
    def agreed(cls, told: Mapping[int, Any], rows: Sequence[Tensor]) -> _ItemFeatures:
        known: dict[str, tuple[int, int]] = {}  # {key: (its number, who sends it)}
        items = []
        of_rows = []
        of_items = []
        for rank, (forms, (sequences, which)) in told.items():
            for key, num_tokens, form in forms:
                if key not in known:
                    known[key] = len(known), rank
                    items.append(MultimodalItem.formed(key, num_tokens, form))
            numbers = torch.tensor([known[key][0] for key, _, _ in forms])
            of_rows.append(rows[rank][sequences])
            of_items.append(numbers[which])
        holders = torch.tensor([rank for _, rank in known.values()])
        return cls(tuple(items), holders, torch.cat(of_rows), torch.cat(of_items))

    def none(self, count: int) -> MultimodalItems:
        return MultimodalItems.none(count)

    def of_dummy(
        self,
    ) -> MultimodalItems:  # or its rank would not run the tower, which others wait for
        return MultimodalItems.none(1)

    def numbers(self, own: MultimodalItems) -> list[Tensor]:
        starts = MultimodalItems(torch.empty(0), self.items).starts.tolist()
        return [own.placed(dict(zip(self.items, starts))).int()]

    def moved(
        self, own: MultimodalItems, numbers: Sequence[Tensor], passage: Passage
    ) -> MultimodalItems:
        wanted = self._wanted(passage)
        rank = passage.world.rank
        mine = {item: item for item in own.items}
        leaving = [which[self.holders[which] == rank].tolist() for which in wanted]
        arriving = [
            wanted[rank][self.holders[wanted[rank]] == r].tolist() for r in range(len(wanted))
        ]
        sizes = [item.nbytes for item in self.items]
        of_bytes = replace(
            passage,
            leaving=[sum(sizes[i] for i in part) for part in leaving],
            arriving=[sum(sizes[i] for i in part) for part in arriving],
        )
        sent = [mine[self.items[i]].as_bytes() for part in leaving for i in part]
        received = of_bytes.moved(torch.cat([torch.empty(0, dtype=torch.uint8), *sent]))
        came = [i for part in arriving for i in part]
        items = [*self.items]  # those that did not come are shown by no token here
        # On the host, where rows are made of them.
        for i, own_bytes in zip(came, received.cpu().split([sizes[i] for i in came])):
            items[i] = self.items[i].of_bytes(own_bytes)
        return MultimodalItems(numbers[0].long(), tuple(items))

    def _wanted(self, passage: Passage) -> list[Tensor]:
        """Return the items that each rank trains on: [p] int64 of each, ascending."""
        dp_ids = passage.dp_ids[self.rows]
        of_dp = {dp: self.multimodal[dp_ids == dp].unique() for dp in {*passage.dp_of_rank}}
        return [of_dp[dp] for dp in passage.dp_of_rank]

    def work(self, num_sequences: int) -> Tensor:
        """Return as many tokens for an item as stand for it, in each sequence that shows it.

        A tower has about a tenth of the language model's parameters and reads 4 to 16 patches for
        one token of it: for one token of an item it computes 0.4 to 1.6 times what the language
        model computes for it. One that sequences of a micro-batch share is computed once, and is
        counted with each: who shares it is not known before the plan is made.
        """
        tokens = torch.tensor([item.num_tokens for item in self.items])
        return tokens.new_zeros(num_sequences).index_add(0, self.rows, tokens[self.multimodal])


_KINDS: dict[str, type[Traveller]] = {
    "sampling_masks": _SamplingMaskBytes,
    "routes": _RouteRows,
    "multimodal": _ItemFeatures,
}
"""{column of Tokens: how it travels}, in the order in which they do."""


def tell(tokens: Tokens, lengths: Tensor) -> dict[str, Any]:
    """Return what the other ranks need to know of a rank's columns, plain: those that it has.

    Args:
        lengths: of the rank's sequences, [N] int64 tokens.
    """
    own = {name: getattr(tokens, name) for name in _KINDS}
    told = {k: _KINDS[k].told(v, lengths) for k, v in own.items() if v is not None}
    return {k: v for k, v in told.items() if v is not None}


def agreed(told: Sequence[Mapping[str, Any]], rows: Sequence[Tensor]) -> dict[str, Traveller]:
    """Return how columns travel, of those that any rank has.

    Args:
        told: what every rank told.
        rows: of every rank, its sequences' rows among the batch's: [N] int64.
    """
    every = {k: {r: own[k] for r, own in enumerate(told) if k in own} for k in _KINDS}
    return {k: _KINDS[k].agreed(own, rows) for k, own in every.items() if own}
