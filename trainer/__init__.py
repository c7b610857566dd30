"""Decides and trains: `spec` holds values, `planning` decisions without torch, `runtime` what happens on devices."""

from pathlib import Path

FOLDER = Path(__file__).parents[1]  # of the package `shardwise`: files that are not code are in it, here and in a wheel
