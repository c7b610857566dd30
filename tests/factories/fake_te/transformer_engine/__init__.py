"""Stands in for Transformer Engine where there is no GPU: its names, its rules about what is FP8 when, and counts.

A product is computed as bf16 autocast would, and counted as FP8 where the real layer would make it one. What the real
one insists on is asserted: dimensions, types, an available recipe. The folder above goes on PYTHONPATH.
"""

__version__ = "2.20.2"
