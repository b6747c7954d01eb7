"""Saving and resuming: sharded, beside the training, completed by one rename.

`manifest` is the form on disk; `save` writes, `restore` reads; `Checkpointer` is both.
"""

from __future__ import annotations

from spmdrl.checkpoint.restore import TrainState, restore
from spmdrl.checkpoint.save import Saver
from spmdrl.checkpoint.state import Saved, SavedSource


class Checkpointer(Saver):
    """Saves and restores one job. Every method is called by every rank, in one order."""

    def restore(self, policy: Saved, source: SavedSource) -> TrainState:
        """Fill policy and source from what `checkpoint.resume` asks for; see `restore`."""
        state = restore(self.cfg, self.world, policy=policy, source=source)
        source.start(state.step)
        return state
