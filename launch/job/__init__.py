"""The job file on disk: YAML, layers of defaults, sweeps; and the folders outside a run.

The folders follow the XDG base directory specification:

cache   token caches, compiled operators and timings of FP8; may be deleted at any time
state   calibration.jsonl, measurements of earlier runs
config  config.yaml, a person's own defaults
"""

import os
from collections.abc import Mapping
from pathlib import Path


def cache_home(environment: Mapping[str, str] = os.environ, *, configured: str | None = None) -> Path:
    """`$SHARDWISE_CACHE`, else the folder of a config.yaml, else `$XDG_CACHE_HOME/shardwise`, else under `~/.cache`."""
    named = environment.get("SHARDWISE_CACHE") or configured
    return Path(named).expanduser() if named else _xdg(environment, "XDG_CACHE_HOME", ".cache")


def state_home(environment: Mapping[str, str] = os.environ) -> Path:
    """`$XDG_STATE_HOME/shardwise`, else `~/.local/state/shardwise`."""
    return _xdg(environment, "XDG_STATE_HOME", ".local/state")


def config_home(environment: Mapping[str, str] = os.environ) -> Path:
    """`$XDG_CONFIG_HOME/shardwise`, else `~/.config/shardwise`."""
    return _xdg(environment, "XDG_CONFIG_HOME", ".config")


def site_config(environment: Mapping[str, str] = os.environ) -> Path | None:
    """The file a cluster's administrator names in `$SHARDWISE_SITE_CONFIG`."""
    named = environment.get("SHARDWISE_SITE_CONFIG")
    return Path(named) if named else None


def _xdg(environment: Mapping[str, str], variable: str, default: str) -> Path:
    base = environment.get(variable)
    return (Path(base) if base else Path(environment.get("HOME") or Path.home()) / default) / "shardwise"
