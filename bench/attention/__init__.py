"""Attention kernels of this machine's GPU beside their rivals: the backends as a model calls them, and the cache's
own moves. Every figure is of one run, each timed call has been compared with a reference first."""
