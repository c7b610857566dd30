"""Stands in for torchao where it is not installed: its float8 layer with one scale a tensor, forwards only in FP8."""

__version__ = "0.18.0"
