"""From micro-batches to a loss, one file per kind of objective."""
