"""Reinforcement learning of LLMs without a driver: one program, every rank runs it."""

__version__ = "0.1.0"
