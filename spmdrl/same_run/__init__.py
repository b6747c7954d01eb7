"""Is this the same run? What a run is made of, and in what two runs differ."""
