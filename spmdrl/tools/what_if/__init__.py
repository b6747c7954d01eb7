"""Try other losses, advantages and corrections on a run's recordings, and compare the updates."""
