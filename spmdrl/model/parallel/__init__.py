"""Parallelism from outside the model, one file per axis."""
