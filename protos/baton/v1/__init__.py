"""Version 1 of the wire: package `baton.v1`."""
