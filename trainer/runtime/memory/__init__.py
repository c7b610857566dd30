"""Recomputation, activation offload, compilation."""
