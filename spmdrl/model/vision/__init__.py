"""Vision models: their towers, and how images are placed among tokens."""
