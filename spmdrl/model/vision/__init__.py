"""Models that see: their towers, and what becomes of images in them."""
