"""What a rank has of the tensors that travel, wherever it lies at the moment."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor

from spmdrl.model.cuts import TensorCut, cut_of
from spmdrl.model.shards import Delta, Held, Part, addresses
from spmdrl.sync.tables import FileTable


class LiveShards:
    """This rank's shards of tensors that travel, taken anew when they have moved.

    Args:
        shards: gives {live name: shard} of now; {} off the trainers.
        parts: {name of a tensor that travels: part of a live tensor}.
        deltas: gives {live name: what to add on reading}, of the same names each time.
        factors: {live name: what to multiply with on reading}.
    """

    def __init__(
        self,
        shards: Callable[[], Mapping[str, Tensor]],
        parts: Mapping[str, Part],
        *,
        deltas: Callable[[], Mapping[str, Delta]] = dict,
        factors: Mapping[str, float] | None = None,
    ):
        self._shards, self._deltas = shards, deltas
        self.parts, self._factors = parts, factors
        self.table = FileTable(parts)
        self._addresses: tuple[int, ...] | None = None
        self.held: Held
        self.refresh()

    def cuts(self) -> dict[str, TensorCut]:
        """Return how this rank's tensors are cut, of those that travel.

        Raises: Refusal for partial sums.
        """
        sent = {part.tensor for part in self.parts.values()}
        return {name: cut_of(name, shard) for name, shard in self._shards().items() if name in sent}

    def refresh(self) -> bool:
        """Take what is there now; return whether it has moved (a restored checkpoint may)."""
        shards, deltas = self._shards(), self._deltas()
        at = addresses(shards)
        if at == self._addresses:
            self.held.deltas = dict(deltas)
            return False
        self.held = Held(shards, self.parts, deltas, self._factors)
        self._addresses = at
        return True
