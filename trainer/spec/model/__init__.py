"""Models as values: the shape from a config.json, the attention kernel."""
