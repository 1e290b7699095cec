"""Attention over the paged cache for any mix of prefills and decodes, and over keys that lie side by side."""
