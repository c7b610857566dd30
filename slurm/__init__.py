"""The cluster: allocations and batch scripts. Never imports torch."""
