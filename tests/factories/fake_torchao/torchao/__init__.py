"""Stands in for torchao where it is not installed: its float8 layer with one scale a tensor, forwards only in FP8.

The products are real ones (`aten::_scaled_mm`, which torch also has on a CPU), reached through a tensor subclass as in
torchao. The folder above goes on PYTHONPATH.
"""

__version__ = "0.18.0"
