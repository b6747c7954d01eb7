"""What a person sees of a run: metrics, console, tracker, log files, curves."""
