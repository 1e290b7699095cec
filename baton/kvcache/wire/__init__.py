"""Wire order: KV without blocks and layout, as it travels between nodes."""
