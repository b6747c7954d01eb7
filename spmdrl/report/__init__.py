"""What a person sees: metrics, console, tracker, log files, curves."""
