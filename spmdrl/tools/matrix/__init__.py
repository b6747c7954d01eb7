"""Which features of a run work together: proved by a test, refused by a rule, or untried."""
