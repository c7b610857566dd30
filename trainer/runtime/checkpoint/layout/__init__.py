"""How each engine and optimizer holds state, and its pieces in a checkpoint."""
