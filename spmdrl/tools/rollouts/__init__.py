"""Showing recorded rollouts, as text and as a page."""
