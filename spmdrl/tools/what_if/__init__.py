"""Compute updates of other losses, advantages and corrections on a run's recorded steps."""
