"""Decode attention over the paged cache: workers share the keys, and a second kernel merges their results."""
