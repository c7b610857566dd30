"""From inputs to a plan: gathering, dry run, trials, stores of calibration."""
