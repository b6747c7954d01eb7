"""Numbers made from texts, the same in every process, on every machine, in every run."""

from __future__ import annotations

import hashlib
from typing import Literal


def hashed(text: str, *, num_bytes: int = 8) -> int:
    """Return a number of `num_bytes` bytes, at least 0: a digest of a text."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=num_bytes).digest(), "big")


def split_of(problem: str) -> Literal["train", "eval"]:
    """Return the split of a problem of a generated task, a function of the problem alone: one in
    five is held out."""
    return "train" if hashed(problem) % 5 else "eval"
