"""Forward passes whose bits do not depend on what else is in the batch (docs/exact.md)."""
