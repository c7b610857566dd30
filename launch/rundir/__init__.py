"""The run directory: paths, files, state, locks, history, logs."""
