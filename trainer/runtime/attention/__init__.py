"""Attention: which kernel runs, and packed rows."""
