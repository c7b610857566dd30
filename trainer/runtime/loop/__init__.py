"""The course of a run: session, step, evaluation, saves."""
