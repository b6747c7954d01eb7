"""Which ranks train and which generate under each `layout.placement`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Placement:
    """Which roles the ranks of a job have."""

    has_engines: bool
    """Whether some ranks generate."""
    shares_devices: bool
    """Whether a rank both trains and generates, in turns."""

    @property
    def overlaps(self) -> bool:
        """Whether ranks generate while others train."""
        return self.has_engines and not self.shares_devices

    def trainer_ranks(self, world_size: int, *, trainers: int) -> range:
        """Return the ranks that train. `trainers`: their number, where not all ranks train."""
        return range(trainers if self.overlaps else world_size)

    def inference_ranks(self, world_size: int, *, trainers: int) -> range:
        """Return the ranks that generate. `trainers`: the number that train, if not all do."""
        if not self.has_engines:
            return range(0)
        return range(trainers if self.overlaps else 0, world_size)


PLACEMENTS = {
    "split": Placement(has_engines=True, shares_devices=False),
    "colocated": Placement(has_engines=True, shares_devices=True),
    "offline": Placement(has_engines=False, shares_devices=False),
}
