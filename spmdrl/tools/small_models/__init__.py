"""Small models with random weights: of a family's code, and for the demos."""
