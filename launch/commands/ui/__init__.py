"""The web pages of `shardwise ui`: runs, one run, runs side by side, and a plan explorer."""
