"""The commands of `shardwise`, one module each."""
