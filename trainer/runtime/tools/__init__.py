"""Programs of their own: measurements, checks, views of data."""
