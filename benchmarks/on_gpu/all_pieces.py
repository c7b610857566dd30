"""The pieces of `benchmarks/gpu.py`, in the order of their importance."""

from on_gpu import caps, gpu_techniques, path, peers, prediction

PIECES = (prediction.PIECE, caps.PIECE, gpu_techniques.PIECE, peers.PIECE, path.PIECE)
