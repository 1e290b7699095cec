"""Package `baton` of the wire."""
