"""Basics that any part of a rank may use: process, clock, counters, state, report, operators."""
