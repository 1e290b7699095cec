"""Transports of messages between nodes: `transport` is the Protocol, `table` lists them by name."""
