"""Weights, from files or drawn, into whole or sharded models."""
