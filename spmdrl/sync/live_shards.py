"""The shards that a rank has of the tensors that travel, wherever they lie at the moment."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor

from spmdrl.model.cuts import TensorCut, cut_of
from spmdrl.model.tensor_parts import Delta, Held, Part, addresses
from spmdrl.sync.tables import FileTable


class LiveShards:
    """This rank's shards of the tensors that travel, which `refresh` reads again if they moved.

    Args:
        shards: returns the current {live name: shard}; {} off the trainers.
        parts: {name of a tensor that travels: part of a live tensor}.
        deltas: returns {live name: what to add on reading}, for the same names each time.
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
        self.parts = parts
        self.table = FileTable(parts)
        self._shards = shards
        self._deltas = deltas
        self._factors = factors
        self._addresses: tuple[int, ...] | None = None
        self.held: Held
        self.refresh()

    def cuts(self) -> dict[str, TensorCut]:
        """Return how this rank's tensors are cut, of those that travel.

        Raises: Refusal for partial sums.
        """
        travelling = {part.tensor for part in self.parts.values()}
        cuts = {}
        for name, shard in self._shards().items():
            if name in travelling:
                cuts[name] = cut_of(name, shard)
        return cuts

    def refresh(self) -> bool:
        """Read the current shards; return whether they moved, as a restored checkpoint's may."""
        shards = self._shards()
        deltas = self._deltas()
        current = addresses(shards)
        if current == self._addresses:
            self.held.deltas = dict(deltas)
            return False
        self.held = Held(shards, self.parts, deltas, self._factors)
        self._addresses = current
        return True
