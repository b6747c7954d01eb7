"""Algorithms as pure functions of tensors: advantages, losses, corrections, and their reduction."""
