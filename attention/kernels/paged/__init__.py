"""Attention over the paged cache for any mix of prefills and decodes, and over contiguous keys."""
