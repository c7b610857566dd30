"""The shape of a model, from its config.json."""
