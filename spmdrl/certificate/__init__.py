"""A record of a run's numbers, with which two runs can be compared."""
