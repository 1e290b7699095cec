"""A checkpoint's config.json as plain values. Needs no torch."""
