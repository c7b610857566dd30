"""Files of a checkpoint: shards, manifest, commit, search."""
