"""A run on several machines: agents, their channel, their hardware."""
