"""Saving and resuming: sharded, beside the training, completed by one rename.

`manifest` is the form on disk; `save` writes, `restore` reads.
"""

from __future__ import annotations

from spmdrl.checkpoint.save import Checkpointer as Checkpointer
