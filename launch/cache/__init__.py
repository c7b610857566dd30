"""What is kept outside of run directories."""
