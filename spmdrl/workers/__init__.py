"""Processes that run what users wrote: rewards, environments."""
