"""What this machine has: memory, GPUs, and their rates."""
