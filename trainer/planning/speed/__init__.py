"""The speed of one training step in closed form."""
