"""Version 1 of what nodes and gateways say to each other: the proto package `baton.internal.v1`."""
