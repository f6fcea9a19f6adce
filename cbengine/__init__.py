"""A compact PyTorch engine for continuous batching that runs the simulator's own policies on a real device."""
