"""Effects on devices: the place for torch, started by `accelerate launch -m shardwise.trainer`."""
