"""Types that every package of the gateway may import: the request, its events, counters shared by worker processes."""
