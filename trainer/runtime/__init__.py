"""Effects on devices: the place for torch, started by `accelerate launch -m trainer`."""
