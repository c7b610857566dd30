"""Data that are read while training goes on."""
