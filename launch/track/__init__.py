"""Trackers of a run: wandb, TensorBoard, notifications."""
