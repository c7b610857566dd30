"""Slurm's output as values."""
