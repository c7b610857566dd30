"""The run in steps, and what its rows cost in padding."""
