"""Prompts as a model takes them: token ids, and the images that placeholder tokens stand for.

A model's tower reads an item, such as an image, and makes one row of embeddings for each of the
item's placeholder tokens. The model's own processor prepares items; nothing here depends on how.

Shape letters: T tokens, P items, S sequences of the whole batch, R ranks.
"""

from __future__ import annotations

import io
import json
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, SupportsIndex, overload

import torch
from torch import Tensor

from spmdrl.columns import AllToAll, TokenColumn, register, to_device
from spmdrl.run_files import json_object

if TYPE_CHECKING:
    import pyarrow as pa


@dataclass(frozen=True, eq=False)
class MultimodalItem:
    """One thing that is not text, such as an image, as the model's processor prepared it. Two items
    of one key are equal."""

    key: str
    """Digest of the thing and of how it was prepared."""
    num_tokens: int
    """Its placeholder tokens, which is also the number of rows of its embedding."""
    features: Mapping[str, Tensor]
    """{argument of the tower: tensor [rows of its own, ...]}, on the CPU. The tower takes those of
    several items concatenated."""
    view: Tensor | None = None
    """[height, width, 3] uint8, RGB, on the CPU: a small image for people; None where it is not
    known. Trainers do not receive it."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, MultimodalItem) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)

    @staticmethod
    def on_meta(
        key: str, num_tokens: int, shapes: Mapping[str, tuple[torch.dtype, Sequence[int]]]
    ) -> MultimodalItem:
        """Return an item on the meta device, of whose features only dtypes and shapes are known."""
        features = {
            name: torch.empty(shape, dtype=dtype, device="meta")
            for name, (dtype, shape) in shapes.items()
        }
        return MultimodalItem(key, num_tokens, features)

    def with_bytes(self, data: Tensor) -> MultimodalItem:
        """Return the item of these shapes with the bytes of `as_bytes`, in memory of its own."""
        features = {}
        start = 0
        for name, like in self.features.items():
            own = data[start : start + like.nbytes]
            # A view as another dtype needs an aligned start, which a clone has.
            features[name] = own.clone().view(like.dtype).view(like.shape)
            start += like.nbytes
        return replace(self, features=features)

    def as_bytes(self) -> Tensor:
        """Return the bytes of its features, concatenated: [nbytes] uint8."""
        parts = self.features.values()
        return torch.cat([part.contiguous().flatten().view(torch.uint8) for part in parts])

    @property
    def nbytes(self) -> int:
        """Bytes of its features."""
        return sum(tensor.nbytes for tensor in self.features.values())

    @property
    def held_bytes(self) -> int:
        """Bytes of all that it holds, with the view for people."""
        return self.nbytes + (0 if self.view is None else self.view.nbytes)


@register
@dataclass(frozen=True, eq=False)
class MultimodalItems(TokenColumn):
    """The items that T tokens stand for, each once, and which row of their embeddings each token
    takes."""

    key = "multimodal"

    places: Tensor
    """[T] int64, row among the concatenated embeddings of `items`; -1 for a token that is no
    placeholder."""
    items: tuple[MultimodalItem, ...]
    """[P], without repetition, in the order of their first tokens."""

    def __len__(self) -> int:
        return len(self.places)

    @property
    def starts(self) -> Tensor:
        """Return where the rows of each item begin, and the end: [P + 1] int64."""
        return _starts(self.items)

    @property
    def is_placeholder(self) -> Tensor:
        """Return which tokens stand for a part of an item: [T] bool."""
        return self.places >= 0

    @property
    def repeated(self) -> list[MultimodalItem]:
        """Return the items in the order of their tokens, as often as they occur."""
        begins = dict(zip(self.starts.tolist(), self.items))
        return [begins[place] for place in self.places.tolist() if place in begins]

    @property
    def nbytes(self) -> int:
        """Bytes of all features."""
        return sum(item.nbytes for item in self.items)

    @classmethod
    def none(cls, count: int) -> MultimodalItems:
        """Return the column of `count` tokens without a placeholder."""
        return MultimodalItems(torch.full((count,), -1), ())

    @classmethod
    def at_placeholders(
        cls, is_placeholder: Tensor, items: Sequence[MultimodalItem]
    ) -> MultimodalItems:
        """Return the column of T tokens that show `items`, one after the other.

        Args:
            is_placeholder: [T] bool, which tokens stand for a part of an item.
            items: in the order of their placeholders. An item that the tokens show twice is in
                here twice, and once in the column.
        Raises: ValueError when the number of placeholders is not that of the items.
        """
        expected = sum(item.num_tokens for item in items)
        found = int(is_placeholder.sum())
        if expected != found:
            raise ValueError(f"{found} tokens are placeholders of items that have {expected}")
        distinct = tuple(dict.fromkeys(items))
        rows = {
            item: torch.arange(start, start + item.num_tokens)
            for item, start in zip(distinct, _starts(distinct).tolist())
        }
        places = torch.full(is_placeholder.shape, -1)
        none = torch.empty(0, dtype=torch.int64)  # torch.cat needs a tensor, also without items
        places[is_placeholder] = torch.cat([none, *(rows[item] for item in items)])
        return cls(places, distinct)

    def state_dict(self) -> dict[str, Any]:
        items = [vars(item) | {"features": dict(item.features)} for item in self.items]
        return {"places": self.places, "items": items}

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any]) -> MultimodalItems:
        items = tuple(MultimodalItem(**item) for item in state["items"])
        return MultimodalItems(state["places"], items)

    def unknown(self, count: int) -> MultimodalItems:
        """Return the column of `count` tokens without a placeholder."""
        return MultimodalItems.none(count)

    @classmethod
    def cat(cls, parts: Sequence[MultimodalItems]) -> MultimodalItems:
        items = tuple(dict.fromkeys(item for part in parts for item in part.items))
        return MultimodalItems(torch.cat([part.places_among(items) for part in parts]), items)

    def __getitem__(self, order: Tensor) -> MultimodalItems:
        """Return the column of the tokens at `order` [n] int64, with the items that they use."""
        own = replace(self, places=self.places[order])
        places = own.places[own.is_placeholder].cpu()
        # An item's index is the number of items that end at or before the place.
        used = torch.bucketize(places, self.starts[1:], right=True).unique()
        items = tuple(self.items[i] for i in used.tolist())
        return MultimodalItems(own.places_among(items), items)

    def places_among(self, items: Sequence[MultimodalItem]) -> Tensor:
        """Return the places of these tokens among the embeddings of `items`, [T] int64. They must
        have all items that these tokens use."""
        if not self.items:
            return self.places
        device = self.places.device
        starts = dict(zip(items, _starts(items).tolist()))
        shifts = [starts.get(item, 0) - own for item, own in zip(self.items, self.starts.tolist())]
        counts = torch.tensor([item.num_tokens for item in self.items])
        shift = torch.tensor(shifts).repeat_interleave(counts).to(device)
        # Tokens without an item have place -1, and stay so below.
        moved = self.places + shift[self.places.clamp(min=0)]
        return torch.where(self.is_placeholder, moved, self.places)

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> MultimodalItems:
        """Return the column with its places on a device. Features are large and stay on the host
        until a tower reads them."""
        places = to_device(self.places, device, non_blocking=non_blocking)
        return MultimodalItems(places, self.items)

    # ---------------------------------------------------------------- exchange between ranks

    def describe(self, lengths: Tensor) -> Any:
        """Return the shapes of this rank's items, and pairs [2, n] int64 of one of its sequences
        and one of these items that it uses; None without items."""
        if not self.items:
            return None
        sequences = torch.arange(len(lengths)).repeat_interleave(lengths)[self.is_placeholder]
        which = torch.bucketize(self.places[self.is_placeholder], self.starts[1:], right=True)
        used, which = which.unique(return_inverse=True)
        shapes = []
        for item in (self.items[i] for i in used.tolist()):
            features = {k: (v.dtype, tuple(v.shape)) for k, v in item.features.items()}
            shapes.append((item.key, item.num_tokens, features))
        return shapes, torch.stack([sequences, which]).unique(dim=1)

    @classmethod
    def agree(
        cls,
        own: MultimodalItems | None,
        described: Mapping[int, Any],
        rows: Sequence[Tensor],
        *,
        count: int,
    ) -> MultimodalItems:
        """Return this rank's column with the places that its tokens have among the items of the
        whole batch. The first rank that has an item sends it."""
        numbers: dict[str, int] = {}
        items: list[MultimodalItem] = []
        senders = []
        of_rows = []
        of_items = []
        for rank, (shapes, (sequences, which)) in described.items():
            for key, num_tokens, features in shapes:
                if key not in numbers:
                    numbers[key] = len(items)
                    items.append(MultimodalItem.on_meta(key, num_tokens, features))
                    senders.append(rank)
            of_rows.append(rows[rank][sequences])
            of_items.append(torch.tensor([numbers[key] for key, _, _ in shapes])[which])
        own = own or MultimodalItems.none(count)
        return _BatchItems(
            own.places_among(items),
            tuple(items),
            held={item: item for item in own.items},
            senders=torch.tensor(senders),
            pair_rows=torch.cat(of_rows),
            pair_items=torch.cat(of_items),
        )

    def exchange(self, numbers: Sequence[Tensor], all_to_all: AllToAll) -> MultimodalItems:
        raise NotImplementedError("only what `agree` returned can be sent")

    def of_dummy(self) -> MultimodalItems:
        """Return a column without items: its rank must run the tower, which others wait for."""
        return MultimodalItems.none(1)

    # ---------------------------------------------------------------- recorded rollouts

    @classmethod
    def arrow_fields(cls) -> tuple[pa.Field, ...]:
        """Return the fields of a sequence's items and places; and, of items that no earlier row of
        its group has, their shapes, features and images for people."""
        import pyarrow as pa

        return (
            pa.field("picture_keys", pa.list_(pa.string())),
            pa.field("picture_places", pa.list_(pa.int32())),
            pa.field(PICTURE_FORMS, pa.list_(pa.string())),
            pa.field(PICTURE_FEATURES, pa.list_(pa.large_binary())),
            pa.field(PICTURE_IMAGES, pa.list_(pa.binary())),
        )

    def arrow_form(self) -> None:
        """Return None: the fields have all of it."""

    def to_arrow(self, lengths: Sequence[int], groups: Sequence[int]) -> list[pa.Array]:
        """Return the values of `arrow_fields`, each item once in its group."""
        import pyarrow as pa

        fields = self.arrow_fields()
        columns: list[list[Any]] = [[] for _ in fields]
        seen: set[tuple[int, MultimodalItem]] = set()
        start = 0
        for group, length in zip(groups, lengths, strict=True):
            own = self[torch.arange(start, start + length)]
            start += length
            new = [item for item in own.items if (group, item) not in seen]
            seen |= {(group, item) for item in new}
            values = (
                [item.key for item in own.items],
                own.places.int().numpy(),
                [_form_text(item) for item in new],
                [item.as_bytes().numpy().tobytes() for item in new],
                [_png(item) for item in new],
            )
            for column, value in zip(columns, values, strict=True):
                column.append(value if self.items else None)
        return [pa.array(own, type=field.type) for field, own in zip(fields, columns, strict=True)]

    @classmethod
    def from_arrow(cls, table: pa.Table, form: Any) -> MultimodalItems:
        """Return the column of a table's tokens; see `TokenColumn.from_arrow`."""
        known: dict[str, MultimodalItem] = {}
        parts: list[MultimodalItems | None] = [cls.none(0)]
        lengths = table["length"].to_pylist()
        names = [field.name for field in cls.arrow_fields()]
        for row, length in zip(table.select(names).to_pylist(), lengths, strict=True):
            keys, places, forms, features, _images = row.values()
            if keys is None:  # the sequence has no items
                parts.append(None)
                continue
            for text, data in zip(forms, features, strict=True):
                item = _recorded_item(item_form(text), data)
                known.setdefault(item.key, item)
            items = tuple(known[key] for key in keys)
            own = MultimodalItems(torch.tensor(places, dtype=torch.int64), items)
            low, high = own.places.aminmax()
            if len(own) != length or low < -1 or high >= own.starts[-1]:
                raise ValueError(
                    f"places of {len(own)} tokens in {len(items)} pictures, of {length}"
                )
            parts.append(own)
        column = cls.concat(parts, [0, *lengths])
        assert column is not None
        return column


@dataclass(frozen=True, eq=False, kw_only=True)
class _BatchItems(MultimodalItems):
    """This rank's tokens among the items of the whole batch, which are on the meta device."""

    held: Mapping[MultimodalItem, MultimodalItem]
    """{item: the same with its features} of this rank."""
    senders: Tensor  # [P] int64, the rank that sends each item
    pair_rows: Tensor  # [n] int64, a sequence among S, and
    pair_items: Tensor  # [n] int64, an item among P that it uses; no pair twice

    def __getitem__(self, order: Tensor) -> _BatchItems:
        return replace(self, places=self.places[order])

    def numbers(self) -> list[Tensor]:
        return [self.places.int()]

    def exchange(self, numbers: Sequence[Tensor], all_to_all: AllToAll) -> MultimodalItems:
        """Send each item once to each rank that trains on a sequence that uses it."""
        wanted = self._wanted(all_to_all)
        rank = all_to_all.rank
        leaving = [which[self.senders[which] == rank].tolist() for which in wanted]
        ranks = range(len(wanted))
        arriving = [wanted[rank][self.senders[wanted[rank]] == r].tolist() for r in ranks]
        sizes = [item.nbytes for item in self.items]
        # torch.cat needs at least one tensor.
        none = torch.empty(0, dtype=torch.uint8)
        sent = [self.held[self.items[i]].as_bytes() for part in leaving for i in part]
        received = all_to_all.send(
            torch.cat([none, *sent]),
            num_leaving=[sum(sizes[i] for i in part) for part in leaving],
            num_arriving=[sum(sizes[i] for i in part) for part in arriving],
        )
        numbers_received = [i for part in arriving for i in part]
        # Items that were not received stay on meta: no token of this rank uses them.
        items = [*self.items]
        parts = received.split([sizes[i] for i in numbers_received])
        for i, data in zip(numbers_received, parts, strict=True):
            items[i] = self.items[i].with_bytes(data)
        return MultimodalItems(numbers[0].long(), tuple(items))

    def _wanted(self, all_to_all: AllToAll) -> list[Tensor]:
        """Return the items that each rank trains on: [n] int64 for each, ascending."""
        dp_of_pair = all_to_all.dp_of_sequence[self.pair_rows]
        dp_of_rank = all_to_all.dp_of_rank
        of_dp = {dp: self.pair_items[dp_of_pair == dp].unique() for dp in {*dp_of_rank}}
        return [of_dp[dp] for dp in dp_of_rank]

    def training_cost(self, num_sequences: int) -> Tensor:
        """Return the number of placeholders in each sequence.

        A tower has about a tenth of the language model's parameters and reads 4 to 16 patches for
        one placeholder. So for an item it computes 0.4 to 1.6 times as much as the language model
        for its placeholders. An item that sequences of a micro-batch share is computed once and
        counted with each: which sequences share it is not known before the plan is made.
        """
        tokens = torch.tensor([item.num_tokens for item in self.items])
        cost = tokens.new_zeros(num_sequences)
        return cost.index_add(0, self.pair_rows, tokens[self.pair_items])


PICTURE_FORMS = "picture_forms"
PICTURE_FEATURES = "picture_features"
PICTURE_IMAGES = "picture_images"


def _form_text(item: MultimodalItem) -> str:
    """Return an item without its features, as JSON."""
    shapes = {name: (str(own.dtype)[6:], [*own.shape]) for name, own in item.features.items()}
    return json.dumps({"key": item.key, "num_tokens": item.num_tokens, "features": shapes})


def _png(item: MultimodalItem) -> bytes:
    """Return an item's view as PNG; empty where it has none."""
    from PIL import Image

    if item.view is None:
        return b""
    written = io.BytesIO()
    Image.fromarray(item.view.numpy()).save(written, "PNG")
    return written.getvalue()


def item_form(text: str) -> dict[str, Any]:
    """Return the JSON of a recorded item: its key, num_tokens, and features as {name: (dtype,
    shape)}. Raises: ValueError for what no run records."""
    form = json_object(text, place="a picture's form")
    count = form.get("num_tokens")
    features = form.get("features")
    is_counted = type(count) is int and 0 <= count < 2**31
    if not is_counted or not isinstance(form.get("key"), str) or not isinstance(features, dict):
        raise ValueError(f"a picture's form is {text!r:.100}")
    for feature in features.values():
        dtype, shape = feature
        are_sizes = all(type(size) is int and 0 <= size < 2**40 for size in shape)
        if not isinstance(getattr(torch, dtype, None), torch.dtype) or not are_sizes:
            raise ValueError(f"a picture's feature is {feature!r:.100}")
    return form


def _recorded_item(form: Mapping[str, Any], data: bytes) -> MultimodalItem:
    shapes = {n: (getattr(torch, dtype), shape) for n, (dtype, shape) in form["features"].items()}
    like = MultimodalItem.on_meta(form["key"], form["num_tokens"], shapes)
    return like.with_bytes(torch.frombuffer(bytearray(data), dtype=torch.uint8))


def _starts(items: Sequence[MultimodalItem]) -> Tensor:
    """Return where each item's rows begin among their concatenated embeddings, and the end."""
    return torch.tensor([0, *(item.num_tokens for item in items)]).cumsum(0)


class TokenIds(tuple[int, ...]):
    """Token ids, with the items of the placeholders among them: a prompt, a turn, a sequence.

    It is a tuple of its ids. Slices and sums keep the items; `tuple`, `list` and `*` of one are the
    ids alone.

    Args:
        ids: T token ids.
        multimodal: their items; None for a model without a tower. By default those of `ids`.
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
        """Return the items of its placeholders."""
        return () if self.multimodal is None else self.multimodal.items

    @property
    def extra_columns(self) -> dict[str, TokenColumn]:
        """Return its items as a column by key; {} for a model without a tower."""
        return {} if self.multimodal is None else {MultimodalItems.key: self.multimodal}

    @property
    def are_placeholders(self) -> list[bool]:
        """Return for each token whether it is a placeholder."""
        if self.multimodal is None:
            return [False] * len(self)
        return self.multimodal.is_placeholder.tolist()

    def once(self) -> list[int]:
        """Return the ids with one placeholder for each occurrence of an item, its first."""
        if self.multimodal is None:
            return list(self)
        places = self.multimodal.places
        is_first = torch.isin(places, self.multimodal.starts[:-1])
        return torch.tensor(self)[(places < 0) | is_first].tolist()

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
        # tuple.__eq__ returns NotImplemented for other types, which is true.
        return super().__eq__(other) is True and _items_at(self) == _items_at(other)

    def __ne__(self, other: object) -> bool:
        # tuple has a __ne__ of its own, which ignores items.
        return not self == other

    # Python sets it to None in a class that defines __eq__.
    __hash__ = tuple.__hash__


def _items_at(ids: object) -> tuple[Any, ...]:
    """Return the items and places of token ids in a form that compares; () without items."""
    own = multimodal_of(ids)
    return (own.items, own.places.tolist()) if own and own.items else ()


def multimodal_of(ids: object) -> MultimodalItems | None:
    """Return the items of token ids; None for a plain sequence."""
    return getattr(ids, "multimodal", None)


def concat_ids(parts: Sequence[Sequence[int]]) -> TokenIds:
    """Join sequences, with their items."""
    ids = [token for part in parts for token in part]
    lengths = [len(part) for part in parts]
    return TokenIds(ids, MultimodalItems.concat([multimodal_of(part) for part in parts], lengths))


_REMEMBERED = 256


class ItemCodec:
    """Encodes the items of prompts that are sent one after another, each item once.

    The sender's `encode` and the receiver's `decode` remember the same latest items, since both see
    the same prompts in the same order.
    """

    def __init__(self) -> None:
        self._known: OrderedDict[str, MultimodalItem] = OrderedDict()

    def encode(self, multimodal: MultimodalItems | None) -> dict[str, Any] | None:
        """Return items as plain data, without the features of those that were sent before."""
        if multimodal is None:
            return None
        new = [item for item in multimodal.items if item.key not in self._known]
        self._remember(multimodal)
        state = MultimodalItems(multimodal.places, tuple(new)).state_dict()
        return state | {"keys": [item.key for item in multimodal.items]}

    def decode(self, encoded: Mapping[str, Any] | None) -> MultimodalItems | None:
        """Return the items that were encoded."""
        if encoded is None:
            return None
        received = MultimodalItems.from_state_dict(encoded)
        new = {item.key: item for item in received.items}
        items = tuple(new.get(key) or self._known[key] for key in encoded["keys"])
        multimodal = MultimodalItems(received.places, items)
        self._remember(multimodal)
        return multimodal

    def _remember(self, multimodal: MultimodalItems) -> None:
        for item in multimodal.items:
            self._known[item.key] = item
            self._known.move_to_end(item.key)
        while len(self._known) > _REMEMBERED:
            self._known.popitem(last=False)
