"""Attention kernels on this machine's GPU compared with their rivals: the backends as a model calls them, and the
cache's own moves. All figures of a table are from one run; each timed call is compared with a reference first."""
