"""Chat with what a run trained."""
