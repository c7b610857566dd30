"""One attempt after another: supervisor, watchdog, retries, limits."""
