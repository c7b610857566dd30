"""Exports of a run."""
