"""Environments, which answer the policy between its turns, and tools that it may call."""
