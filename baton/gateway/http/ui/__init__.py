"""The page /ui: its files, and the JSON that it shows."""
