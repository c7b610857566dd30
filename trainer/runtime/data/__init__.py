"""Data: from sources to rows of token ids, and the batches of a step."""
