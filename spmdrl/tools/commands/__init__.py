"""What a person types: `python -m spmdrl NAME`."""
