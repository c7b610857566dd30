"""Decisions as pure functions of values: no torch, no files, no clock."""
