"""What a model is on this rank: files, shards, shapes and one packed forward pass."""
