"""What `benchmarks/gpu.py` runs: cases of real models on one card, each as a run of its own, and what they came to."""
