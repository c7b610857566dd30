"""Effects on the machine: the command line, the probe, configuration files, processes. Never imports torch."""
