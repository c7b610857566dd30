"""Decides and trains: `spec` holds values, `planning` decisions without torch, `runtime` what happens on devices."""

from pathlib import Path

# Of the package `shardwise`, which also holds the files that are not code, in a checkout and in a wheel alike. Resolved
# after `parents`: in a checkout this folder is a link.
FOLDER = Path(__file__).parents[1].resolve()
