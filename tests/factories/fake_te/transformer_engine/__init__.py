"""Stands in for Transformer Engine where there is no GPU: its names, its rules about what is FP8 when, and counts."""

__version__ = "2.20.2"
