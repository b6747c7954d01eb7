"""Packed attention: which tokens see which, kernels, and how layers keep sequences apart."""
