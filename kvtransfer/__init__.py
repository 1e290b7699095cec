"""Moves paged KV between two nodes: wire plan, segments, leases, staging and transports.

It also keeps KV entries outside of the cache, in host memory and the stores below it.

Its input is token ranges and block ids, its output filled leases. Importing it touches no device and starts no thread.
"""
