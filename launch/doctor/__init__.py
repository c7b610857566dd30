"""`shardwise doctor`: checks of this machine by subject."""
