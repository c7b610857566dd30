"""Prediction cases: everything pinned, nothing searched."""
