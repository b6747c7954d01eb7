"""Which ranks train and which generate: what each `layout.placement` means, to be asked of it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Placement:
    """How the two roles lie on the ranks of a job."""

    has_engines: bool
    """Whether some ranks generate."""
    shares_devices: bool
    """Whether a rank both trains and generates, in turns."""

    @property
    def overlaps(self) -> bool:
        """Whether ranks generate while others train."""
        return self.has_engines and not self.shares_devices

    def trainer_ranks(self, world_size: int, *, trainers: int) -> range:
        """Return the ranks that train. `trainers`: how many, where not all do."""
        return range(trainers if self.overlaps else world_size)

    def inference_ranks(self, world_size: int, *, trainers: int) -> range:
        """Return the ranks that generate. `trainers`: how many train, where not all do."""
        if not self.has_engines:
            return range(0)
        return range(trainers if self.overlaps else 0, world_size)


PLACEMENTS = {
    "split": Placement(has_engines=True, shares_devices=False),
    "colocated": Placement(has_engines=True, shares_devices=True),
    "offline": Placement(has_engines=False, shares_devices=False),
}
