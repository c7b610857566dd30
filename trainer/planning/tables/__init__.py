"""Facts: strategies, GPUs, learning rates."""
