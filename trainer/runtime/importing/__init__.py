"""Other trainers' checkpoints."""
