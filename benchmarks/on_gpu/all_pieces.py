"""The pieces of `benchmarks/gpu.py`, in the order of their importance."""

from on_gpu import prediction

PIECES = (prediction.PIECE,)
