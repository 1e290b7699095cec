"""Decode attention over the paged cache: workers share the keys, and the last one or a second kernel merges results."""
