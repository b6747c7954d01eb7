"""Which features of a run go together: proved by a test, refused by a rule, or untried."""
