"""Data: rows from files and generators, prompts, supervised examples, partition plans."""
