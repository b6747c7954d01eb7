"""Saving and resuming. Checkpoints are sharded, written in the background, completed by a rename.

`manifest` is the form on disk; `save` writes, `restore` reads.
"""

from __future__ import annotations

from spmdrl.checkpoint.save import Checkpointer as Checkpointer
