"""Version 1 of the wire: the proto package `baton.v1`."""
