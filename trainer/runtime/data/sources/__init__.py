"""Readers of text and of rows."""
