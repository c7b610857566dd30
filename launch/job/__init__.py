"""The job file on disk: YAML, layers of defaults, sweeps, the extensions file."""
