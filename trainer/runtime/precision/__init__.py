"""Precision: autocast, loss scaling, FP8."""
