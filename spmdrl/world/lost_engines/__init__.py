"""Going on without inference ranks that are gone (`layout.survive_engines`)."""
