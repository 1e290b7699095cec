"""Moves paged KV between two nodes: wire plan, segments, leases, staging and transports.

Keeps entries of KV outside of the cache, in host memory and the stores below it.

Token ranges and block ids go in, filled leases come out. Importing it touches no device and starts no thread.
"""
