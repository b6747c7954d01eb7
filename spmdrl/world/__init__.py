"""One job over all ranks: what the launcher said, the groups and meshes, waits with names."""
