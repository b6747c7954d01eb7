"""The error of our own checks. Loads nothing, so that every room can raise it."""

from __future__ import annotations


class Refusal(ValueError):
    """What is asked for cannot be done right: the message says what, where, the value seen and what
    to do, and is shown alone. Any other error is shown with its traceback."""
