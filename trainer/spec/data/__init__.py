"""Training data as values: requests, profiles, order, shapes of rows."""
