"""One job over all ranks: its launch, process groups and meshes, and waits with names."""
