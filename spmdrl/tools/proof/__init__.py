"""What a model is proved by: the product itself, run on a small model of the same code."""
