"""Low-rank adapters: in the model, on disk, merged."""
