"""Columns of tokens that only some runs have, such as router routes.

Each kind of column is one class, registered by `register`. The class joins columns, indexes them,
moves them to a device, saves them, and sends them to the ranks that train on the tokens. `Tokens`,
engines, the exchange and checkpoints hold columns by key, and treat all kinds the same.

Shape letters: T tokens, S sequences of the whole batch, R ranks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Self, TypeAlias, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from spmdrl.errors import Refusal

if TYPE_CHECKING:
    import pyarrow as pa


@dataclass(frozen=True)
class AllToAll:
    """The tokens that this rank sends to and receives from each rank, in the order of ranks."""

    rank: int
    num_leaving: Sequence[int]  # [R], tokens
    num_arriving: Sequence[int]  # [R], tokens
    dp_of_rank: Sequence[int]  # [R], data-parallel index; -1 for ranks that do not train
    dp_of_sequence: Tensor  # [S] int64, data-parallel index that trains on the sequence
    group: dist.ProcessGroup | None
    """gloo group of all ranks. Rollouts are made on the host, and packed there too."""

    def send(
        self,
        rows: Tensor,
        *,
        num_leaving: Sequence[int] | None = None,
        num_arriving: Sequence[int] | None = None,
    ) -> Tensor:
        """Send rows and return the rows received. A single rank's are returned as they are.

        Args:
            rows: on the host.
            num_leaving, num_arriving: rows per rank; by default one for each token.
        """
        leaving = [*(self.num_leaving if num_leaving is None else num_leaving)]
        arriving = [*(self.num_arriving if num_arriving is None else num_arriving)]
        if len(leaving) == 1:
            return rows
        received = rows.new_empty(sum(arriving), *rows.shape[1:])
        dist.all_to_all_single(received, rows, arriving, leaving, group=self.group)
        return received


def to_device(tensor: Tensor, device: torch.device | str, *, non_blocking: bool = True) -> Tensor:
    """Return a tensor on a device.

    Args:
        non_blocking: a copy may still be under way when this returns. From the host to a GPU it
            goes through pinned memory: from other memory, it would wait for all that is launched.
    """
    device = torch.device(device)
    if non_blocking and device.type == "cuda" and tensor.device.type == "cpu":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=non_blocking)


class TokenColumn(ABC):
    """Values for each of T consecutive tokens."""

    key: ClassVar[str]
    """The column's name in `extra_columns`, in checkpoints and in files."""
    covers_prompt: ClassVar[bool] = False
    """Whether an engine reports the column for a request's first tokens, prompt included. If not,
    it reports it for the sampled tokens."""

    @classmethod
    def of(cls, columns: Mapping[str, TokenColumn]) -> Self | None:
        """Return the column of this class; None if the tokens have none."""
        column = columns.get(cls.key)
        assert column is None or isinstance(column, cls)
        return column

    # ---------------------------------------------------------------- join, index, move

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of tokens."""

    @abstractmethod
    def __getitem__(self, order: Tensor) -> Self:
        """Return the column of the tokens at `order` [n] int64."""

    @abstractmethod
    def unknown(self, count: int) -> Self:
        """Return a column of this form with `count` tokens whose values are unknown."""

    @classmethod
    @abstractmethod
    def cat(cls, parts: Sequence[Self]) -> Self:
        """Join columns, at least one, in order."""

    @abstractmethod
    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> Self:
        """Return the column on a device."""

    @classmethod
    def concat(cls, parts: Sequence[Self | None], lengths: Sequence[int]) -> Self | None:
        """Join the columns of consecutive stretches of tokens.

        Args:
            parts: the column of each stretch, or None. A column may cover only the first tokens of
                its stretch; the values of the other tokens are unknown.
            lengths: tokens of each stretch.
        Returns: the column of all tokens; None if all parts are None.
        """
        like = next((part for part in parts if part is not None), None)
        if like is None:
            return None
        padded: list[Self] = []
        for part, length in zip(parts, lengths, strict=True):
            missing = length
            if part is not None:
                missing -= len(part)
                padded.append(part)
            assert missing >= 0, f"{cls.key} has {len(padded[-1])} tokens of {length}"
            if missing:
                padded.append(like.unknown(missing))
        return cls.cat(padded)

    # ---------------------------------------------------------------- checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Return the column as plain values. Tensors are not copied."""
        return dict(vars(self))

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any]) -> Self:
        """Return the column that `state_dict` was taken from."""
        return cls(**state)

    # ---------------------------------------------------------------- exchange between ranks

    def describe(self, lengths: Tensor) -> Any:
        """Return plain data about this rank's column; None if there is nothing to send.

        All ranks gather these data before they send tokens.

        Args:
            lengths: [n] int64, tokens of this rank's sequences.
        """
        return self.unknown(0).state_dict()

    @classmethod
    def agree(
        cls, own: Self | None, described: Mapping[int, Any], rows: Sequence[Tensor], *, count: int
    ) -> Self:
        """Return this rank's column in the form that all ranks send.

        Args:
            own: this rank's column, or None.
            described: {rank: result of `describe` there}, at least one.
            rows: for each rank, [n] int64: positions of its sequences in the whole batch.
            count: number of this rank's tokens.
        """
        if own is not None:
            return own
        return cls.from_state_dict(next(iter(described.values()))).unknown(count)

    def numbers(self) -> list[Tensor]:
        """Return numbers to send together with each token: [T] int32 each."""
        return []

    @abstractmethod
    def exchange(self, numbers: Sequence[Tensor], all_to_all: AllToAll) -> TokenColumn:
        """Send the column and return the column of the received tokens; all ranks call it together.

        Args:
            numbers: the other ranks' `numbers`, received with the tokens.
        """

    def training_cost(self, num_sequences: int) -> Tensor | None:
        """Return the additional cost of training on each sequence of the batch: [S] int64, in
        tokens; None for no cost."""
        return None

    def of_dummy(self) -> Self | None:
        """Return the column of the single token of a dummy micro-batch; None for no column."""
        return None

    # ---------------------------------------------------------------- recorded rollouts

    @classmethod
    @abstractmethod
    def arrow_fields(cls) -> tuple[pa.Field, ...]:
        """Return the column's fields in a table of sequences; null for sequences without values."""

    @abstractmethod
    def arrow_form(self) -> Any:
        """Return JSON that `from_arrow` needs in addition to the fields."""

    @abstractmethod
    def to_arrow(self, lengths: Sequence[int], groups: Sequence[int]) -> list[pa.Array]:
        """Return the values of `arrow_fields` for consecutive sequences.

        Args:
            lengths: [n], tokens of each sequence.
            groups: [n], the group of each.
        """

    @classmethod
    @abstractmethod
    def from_arrow(cls, table: pa.Table, form: Any) -> Self:
        """Return the column of the tokens of a table's sequences.

        Args:
            table: whole groups; their greedy rows may be left out.
            form: the result of `arrow_form`.
        Raises: ValueError for values that no run records.
        """


@dataclass(frozen=True, eq=False)
class RowColumn(TokenColumn):
    """A row of numbers for each token, all of one shape and dtype; -1 for unknown tokens."""

    rows: Tensor  # [T, ...]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, order: Tensor) -> Self:
        return type(self)(self.rows[order])

    def unknown(self, count: int) -> Self:
        return type(self)(self.rows.new_full((count, *self.rows.shape[1:]), -1))

    @classmethod
    def cat(cls, parts: Sequence[Self]) -> Self:
        return cls(torch.cat([part.rows for part in parts]))

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> Self:
        return type(self)(to_device(self.rows, device, non_blocking=non_blocking))

    def exchange(self, numbers: Sequence[Tensor], all_to_all: AllToAll) -> Self:
        flat = self.rows.flatten(1).contiguous()
        # Send bytes, since NCCL has no int16.
        received = all_to_all.send(flat.view(torch.uint8))
        return type(self)(received.view(self.rows.dtype).unflatten(1, self.rows.shape[1:]))

    @classmethod
    def arrow_fields(cls) -> tuple[pa.Field, ...]:
        import pyarrow as pa

        return (pa.field(cls.key, pa.large_binary()),)

    def arrow_form(self) -> list[Any]:
        """Return the dtype and the shape of a row."""
        return [str(self.rows.dtype).removeprefix("torch."), *self.rows.shape[1:]]

    def to_arrow(self, lengths: Sequence[int], groups: Sequence[int]) -> list[pa.Array]:
        """Return the bytes of each sequence's rows; see `TokenColumn.to_arrow`."""
        import pyarrow as pa

        data = []
        for rows in self.rows.split([*lengths]):
            is_known = bool((rows != -1).any())
            data.append(rows.contiguous().numpy().tobytes() if is_known else None)
        (field,) = self.arrow_fields()
        return [pa.array(data, type=field.type)]

    @classmethod
    def from_arrow(cls, table: pa.Table, form: Any) -> Self:
        """Return the rows of a table's tokens; see `TokenColumn.from_arrow`."""
        name, *shape = form
        dtype = getattr(torch, str(name), None)
        sizes = [size for size in shape if type(size) is int and 0 < size < 2**20]
        if not isinstance(dtype, torch.dtype) or len(sizes) < len(shape):
            raise ValueError(f"the rows of {cls.key} have the form {form!r:.60}")
        # This part has no tokens, but a shape: `concat` needs one if all other parts are None.
        parts: list[Self | None] = [cls(torch.empty(0, *shape, dtype=dtype))]
        lengths = table["length"].to_pylist()
        for data, length in zip(table[cls.key].to_pylist(), lengths, strict=True):
            part = None
            if data is not None:
                # Copy the bytes, since torch warns about read-only memory.
                part = cls(torch.frombuffer(bytearray(data), dtype=dtype).view(-1, *shape))
                if len(part) != length:
                    raise ValueError(f"{cls.key} has {len(part)} tokens of {length}")
            parts.append(part)
        column = cls.concat(parts, [0, *lengths])
        assert column is not None
        return column


Columns: TypeAlias = Mapping[str, TokenColumn]
"""{key: column} of the same tokens."""

AnyColumn = TypeVar("AnyColumn", bound=TokenColumn)
_CLASSES: dict[str, type[TokenColumn]] = {}


def register(cls: type[AnyColumn]) -> type[AnyColumn]:
    """Let columns of a class be exchanged, saved and restored by their key."""
    assert _CLASSES.setdefault(cls.key, cls) is cls, f"two columns have the key {cls.key}"
    return cls


def column_class(key: str) -> type[TokenColumn]:
    """Return the class that is registered under a key. Raises: Refusal for an unknown key."""
    if key not in _CLASSES:
        raise Refusal(
            f"column {key!r:.60} of tokens is not registered; the registered ones are "
            f"{', '.join(sorted(_CLASSES))}; import the module that defines it"
        )
    return _CLASSES[key]


def column_classes() -> Mapping[str, type[TokenColumn]]:
    """Return {key: class} of all registered columns."""
    return _CLASSES


def concat_columns(parts: Sequence[Columns], lengths: Sequence[int]) -> dict[str, TokenColumn]:
    """Join the columns of consecutive stretches of tokens; see `TokenColumn.concat`."""
    joined = {}
    for key in dict.fromkeys(key for part in parts for key in part):
        column = column_class(key).concat([part.get(key) for part in parts], lengths)
        assert column is not None, "a part has this key"
        joined[key] = column
    return joined


@register
class RouterRoutes(RowColumn):
    """[T, L, K] int8 or int16: the K experts of each token in each of L layers with experts, as the
    engine chose them."""

    key = "routes"
    covers_prompt = True
