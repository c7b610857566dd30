"""The job file on disk: YAML, layers of defaults, sweeps; and the folders outside a run."""
