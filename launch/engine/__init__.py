"""Configuration files, operators and the command line of `accelerate launch`."""
