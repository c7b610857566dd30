"""What a rank holds, and when."""
