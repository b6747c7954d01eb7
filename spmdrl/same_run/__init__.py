"""Whether two runs are the same: what a run is made of, and how two runs differ."""
