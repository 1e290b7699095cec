"""Decode attention over the paged cache: workers share the keys, and the last one of a request merges their results."""
