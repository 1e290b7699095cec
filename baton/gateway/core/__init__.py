"""What every room of the gateway may import: the request, its events, counters shared by worker processes."""
