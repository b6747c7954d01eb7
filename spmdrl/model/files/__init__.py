"""A model folder's files: which tensors they hold, and slices of them."""
