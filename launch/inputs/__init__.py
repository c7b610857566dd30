"""Model folders, hub ids and data files: found, checked and fetched before anything heavy starts."""
