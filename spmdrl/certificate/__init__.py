"""A record of a run's numbers, by which two runs can be compared."""
