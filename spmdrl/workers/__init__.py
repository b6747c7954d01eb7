"""Processes that run users' code: rewards and environments."""
