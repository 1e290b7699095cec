"""A checkpoint's config.json as plain values, read without torch."""
