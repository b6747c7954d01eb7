"""What pictures take in memory: estimates from a model's config, for the planner."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

_FLOAT = 4  # bytes; what a processor gives is float32


@dataclass(frozen=True)
class VisionTowerShape:
    """A vision tower, as far as memory goes."""

    patches: float  # that it reads for one token of the language model
    patch_bytes: int  # of a patch's pixels
    layers: int
    hidden: int  # elements of a patch between two blocks
    kept: int  # elements of a patch that a block keeps for its backward pass

    @classmethod
    def of(cls, config: Any) -> VisionTowerShape:
        """Read the tower's shape in the config of a model that sees.

        A block keeps about ten times the hidden size (inputs of two norms and what these give,
        queries, keys and values, the attention's and the projection's results) and three times the
        intermediate one.
        """
        tower = config.vision_config
        hidden = tower.hidden_size
        inner = tower.intermediate_size
        side = _first(tower.patch_size)
        return cls(
            patches=_patches(config, side),
            patch_bytes=_FLOAT * 3 * side**2 * getattr(tower, "temporal_patch_size", 1),
            layers=getattr(tower, "depth", None) or tower.num_hidden_layers,
            hidden=hidden,
            kept=10 * hidden + 3 * inner,
        )


def _patches(config: Any, side: int) -> float:
    """Return the patches that become one token: a square of them, or what an image has."""
    tower = config.vision_config
    if hasattr(tower, "spatial_merge_size"):
        return tower.spatial_merge_size**2
    if hasattr(config, "downsample_ratio"):
        return config.downsample_ratio**-2
    return (_first(tower.image_size) // side) ** 2 / config.mm_tokens_per_image


def _first(size: Any) -> int:
    return size if isinstance(size, int) else size[0]
