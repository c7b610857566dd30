"""Losses: heads, slices, objectives, DPO."""
