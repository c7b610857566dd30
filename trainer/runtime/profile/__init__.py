"""Profiles: memory of a rank by part, phase and module."""
