"""Explanations of a plan, for people."""
