"""What the data are: requests, profiles, order, columns."""
