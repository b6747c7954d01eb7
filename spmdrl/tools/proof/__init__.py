"""Prove a model: run the program itself on a small model of the same code."""
