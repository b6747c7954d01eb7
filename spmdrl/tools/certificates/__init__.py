"""Reading a run's certificate, and taking its steps again."""
