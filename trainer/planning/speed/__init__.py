"""The speed of one training step in closed form, and the time of the files that a run writes."""
