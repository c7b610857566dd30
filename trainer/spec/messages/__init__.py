"""Values that cross between processes of one run."""
