"""A model on this rank: its files, shards, shapes and packed forward pass."""
