"""The course of a run: preparation, attempts one after another, short runs for trials and the ladder."""
