"""What a model is given: token ids, and what they show, from data to engine and trainer.

A token may stand for a part of something that is no text and that a tower of the model reads: an
item. Items are what the model's own processor made of an attachment; nothing here depends on that.

Letters: T tokens, P items, E rows of embeddings: what the model's tower makes of the items, one row
for each token that stands for a part of one.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, SupportsIndex, overload

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class MultimodalItem:
    """One thing that tokens show, as the model's processor prepared it. Two of one key are the
    same."""

    key: str
    """Digest of the thing and of how it was prepared."""
    num_tokens: int
    """Tokens that stand for it, which is also the rows of its embedding."""
    features: Mapping[str, Tensor]
    """{argument of the tower: tensor [rows of its own, ...]}; those of several items follow one
    another. On the CPU."""
    view: Tensor | None = None
    """[height, width, 3] uint8, RGB, on the CPU: what people are shown of it, small; None where it
    is not known. It does not go to trainers."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, MultimodalItem) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)

    @staticmethod
    def formed(
        key: str, num_tokens: int, forms: Mapping[str, tuple[torch.dtype, Sequence[int]]]
    ) -> MultimodalItem:
        """Return one of whose features, on the meta device, dtypes and shapes alone are known."""
        meta = {n: torch.empty(shape, dtype=d, device="meta") for n, (d, shape) in forms.items()}
        return MultimodalItem(key, num_tokens, meta)

    def of_bytes(self, data: Tensor) -> MultimodalItem:
        """Return the one of this form whose bytes these are; memory of its own, aligned."""
        parts = data.split([like.nbytes for like in self.features.values()])
        pairs = zip(self.features.items(), parts)
        features = {name: x.clone().view(own.dtype).view(own.shape) for (name, own), x in pairs}
        return replace(self, features=features)

    def as_bytes(self) -> Tensor:
        """Return its features' bytes, one after the other: [nbytes] uint8."""
        parts = self.features.values()
        return torch.cat([part.contiguous().flatten().view(torch.uint8) for part in parts])

    @property
    def nbytes(self) -> int:
        """Bytes of its features."""
        return sum(tensor.nbytes for tensor in self.features.values())

    @property
    def held_bytes(self) -> int:
        """Bytes of all that it holds, the view for people too."""
        return self.nbytes + (0 if self.view is None else self.view.nbytes)


@dataclass(frozen=True)
class MultimodalItems:
    """The items that T tokens show, each once, and which row of their embeddings each token is."""

    places: Tensor
    """[T] int64, row among the embeddings of `items`, one after the other; -1 for a token that
    shows nothing."""
    items: tuple[MultimodalItem, ...]
    """[P], without repetition, in the order in which tokens first show them."""

    def __len__(self) -> int:
        return len(self.places)

    @property
    def starts(self) -> Tensor:
        """Return where the rows of each item begin, and the end: [P + 1] int64."""
        counts = torch.tensor([0, *(item.num_tokens for item in self.items)])
        return counts.cumsum(0)

    @property
    def repeated(self) -> list[MultimodalItem]:
        """Return the items in the order of the tokens that show them, as often as they do."""
        begins = dict(zip(self.starts.tolist(), self.items))
        return [begins[place] for place in self.places.tolist() if place in begins]

    @property
    def nbytes(self) -> int:
        """Bytes of all features."""
        return sum(item.nbytes for item in self.items)

    @classmethod
    def none(cls, count: int) -> MultimodalItems:
        """Return what `count` tokens show that show nothing."""
        return cls(torch.full((count,), -1), ())

    @classmethod
    def at_placeholders(
        cls, is_placeholder: Tensor, items: Sequence[MultimodalItem]
    ) -> MultimodalItems:
        """Return what tokens show where those of an item follow one another.

        Args:
            is_placeholder: [T] bool, tokens that stand for a part of an item.
            items: in the order of their tokens; one may come twice.
        Raises: ValueError when the tokens are not as many as the items have.
        """
        expected = sum(p.num_tokens for p in items)
        found = int(is_placeholder.sum())
        if expected != found:
            raise ValueError(f"{found} tokens stand for items that have {expected}")
        own = tuple(dict.fromkeys(items))
        starts = cls(torch.empty(0), own).starts
        at = {}
        rows = [torch.empty(0, dtype=torch.int64)]
        for item, start in zip(own, starts.tolist()):
            at[item] = torch.arange(start, start + item.num_tokens)
        rows += [at[item] for item in items]
        places = torch.full(is_placeholder.shape, -1)
        places[is_placeholder] = torch.cat(rows)
        return cls(places, own)

    @staticmethod
    def restored(plain: Mapping[str, Any] | None) -> MultimodalItems | None:
        """Undo `plain`; None for none."""
        if plain is None:
            return None
        return MultimodalItems(
            plain["places"], tuple(MultimodalItem(**item) for item in plain["items"])
        )

    def plain(self) -> dict[str, Any]:
        """Return all fields, as dictionaries; tensors are shared."""
        items = [vars(item) | {"features": dict(item.features)} for item in self.items]
        return {"places": self.places, "items": items}

    @staticmethod
    def concat(
        parts: Sequence[MultimodalItems | None], lengths: Sequence[int]
    ) -> MultimodalItems | None:
        """Join what consecutive tokens show, `lengths` of them each; None shows nothing.

        Returns: None where all parts are None.
        """
        if not any(part is not None for part in parts):
            return None
        items = tuple(dict.fromkeys(item for part in parts if part for item in part.items))
        starts = dict(zip(items, MultimodalItems(torch.empty(0), items).starts.tolist()))
        places = []
        for part, length in zip(parts, lengths):
            part = part or MultimodalItems.none(length)
            assert len(part) == length, f"{len(part)} tokens show something, where {length} are"
            places.append(part.placed(starts))
        return MultimodalItems(torch.cat(places), items)

    def __getitem__(self, order: Tensor) -> MultimodalItems:
        """Return what the tokens at `order` [n] int64 show, without the items that none shows."""
        places = self.places[order]
        used = torch.bucketize(places[places >= 0].cpu(), self.starts[1:], right=True).unique()
        items = tuple(self.items[i] for i in used.tolist())
        own = MultimodalItems(places, self.items)
        return MultimodalItems(
            own.placed(dict(zip(items, MultimodalItems(places, items).starts.tolist()))), items
        )

    def placed(self, starts: Mapping[MultimodalItem, int]) -> Tensor:
        """Return the places where each item's rows begin elsewhere; those left out keep none."""
        if not self.items:
            return self.places
        device = self.places.device
        shifts = [starts.get(item, 0) - own for item, own in zip(self.items, self.starts.tolist())]
        counts = torch.tensor([item.num_tokens for item in self.items])
        shift = torch.tensor(shifts).repeat_interleave(counts).to(device)
        is_placeholder = self.places >= 0
        return torch.where(
            is_placeholder, self.places + shift[self.places.clamp(min=0)], self.places
        )

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> MultimodalItems:
        """Return the same with the places on a device; features, which are large, stay on the host
        until a tower reads them."""
        return MultimodalItems(self.places.to(device, non_blocking=non_blocking), self.items)

    def cpu(self) -> MultimodalItems:
        """Return the same with the places on the CPU."""
        return self.to("cpu")


class TokenIds(tuple[int, ...]):
    """Token ids and what they show: a prompt, a turn, a sequence. To whoever asks for no more it is
    the tuple of its ids.

    Slices and sums keep what is shown; `tuple`, `list` and `*` of one are the ids alone.

    Args:
        ids: T token ids.
        multimodal: items of these; None of a model without a tower. By default those of `ids`.
    """

    multimodal: MultimodalItems | None

    def __new__(
        cls, ids: Iterable[int] = (), multimodal: MultimodalItems | None = None
    ) -> TokenIds:
        """Make one; see the class."""
        own = super().__new__(cls, ids)
        own.multimodal = multimodal_of(ids) if multimodal is None else multimodal
        assert own.multimodal is None or len(own.multimodal) == len(own)
        return own

    @property
    def items(self) -> tuple[MultimodalItem, ...]:
        """Return the items that are shown."""
        return () if self.multimodal is None else self.multimodal.items

    @property
    def are_placeholders(self) -> list[bool]:
        """Return of each token whether it stands for a part of an item."""
        return (
            [False] * len(self)
            if self.multimodal is None
            else (self.multimodal.places >= 0).tolist()
        )

    def once(self) -> list[int]:
        """Return the ids with one for each showing of an item, the first."""
        if self.multimodal is None:
            return list(self)
        is_text = self.multimodal.places < 0
        is_first = torch.isin(self.multimodal.places, self.multimodal.starts[:-1])
        return torch.tensor(self)[is_text | is_first].tolist()

    @overload
    def __getitem__(self, at: SupportsIndex) -> int: ...
    @overload
    def __getitem__(self, at: slice) -> TokenIds: ...
    def __getitem__(self, at: SupportsIndex | slice) -> int | TokenIds:
        if not isinstance(at, slice):
            return super().__getitem__(at)
        ids = super().__getitem__(at)
        if self.multimodal is None:
            return TokenIds(ids)
        return TokenIds(ids, self.multimodal[torch.arange(len(self))[at]])

    def __add__(self, other: Sequence[int]) -> TokenIds:  # type: ignore[override]
        return concat_ids([self, other])

    def __radd__(self, other: Sequence[int]) -> TokenIds:
        return concat_ids([other, self])

    def __eq__(self, other: object) -> bool:
        if super().__eq__(other) is not True:
            return False
        return _told_apart(self) == _told_apart(other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = tuple.__hash__


def _told_apart(ids: object) -> tuple[Any, ...]:
    """Return what token ids show, to be compared."""
    multimodal = multimodal_of(ids)
    return (multimodal.items, multimodal.places.tolist()) if multimodal and multimodal.items else ()


def multimodal_of(ids: object) -> MultimodalItems | None:
    """Return what token ids show; None of a plain sequence."""
    return getattr(ids, "multimodal", None)


def concat_ids(parts: Sequence[Sequence[int]]) -> TokenIds:
    """Return sequences one after another, with what they show."""
    multimodal = MultimodalItems.concat(
        [multimodal_of(part) for part in parts], [len(part) for part in parts]
    )
    return TokenIds((one for part in parts for one in part), multimodal)


_REMEMBERED = 256


class ItemCodec:
    """Items that are told one after another, each once: `encode` at one end, `decode` at the other.

    Both ends remember the same ones, the latest, since they hear of the same ones in one order.
    """

    def __init__(self) -> None:
        self._known: OrderedDict[str, MultimodalItem] = OrderedDict()

    def encode(self, multimodal: MultimodalItems | None) -> dict[str, Any] | None:
        """Return what is shown as plain data, without items that were said before."""
        if multimodal is None:
            return None
        new = [item for item in multimodal.items if item.key not in self._known]
        self._remember(multimodal)
        keys = {"keys": [item.key for item in multimodal.items]}
        return MultimodalItems(multimodal.places, tuple(new)).plain() | keys

    def decode(self, said: Mapping[str, Any] | None) -> MultimodalItems | None:
        """Return what was said."""
        if said is None:
            return None
        new = {item["key"]: MultimodalItem(**item) for item in said["items"]}
        items = tuple(new.get(key) or self._known[key] for key in said["keys"])
        multimodal = MultimodalItems(said["places"], items)
        self._remember(multimodal)
        return multimodal

    def _remember(self, multimodal: MultimodalItems) -> None:
        for item in multimodal.items:
            self._known[item.key] = item
            self._known.move_to_end(item.key)
        while len(self._known) > _REMEMBERED:
            self._known.popitem(last=False)
