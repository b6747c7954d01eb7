"""What this machine has: memory and GPUs, and the rates of GPUs."""
