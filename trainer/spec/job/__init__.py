"""The job file as a value: settings, reading, checks, schema."""
