"""Algorithms as pure functions of tensors: advantages, losses, corrections, reductions."""
