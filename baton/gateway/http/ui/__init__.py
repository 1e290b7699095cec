"""The page at /ui: its files, and the JSON that it shows."""
