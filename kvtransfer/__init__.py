"""Moves paged KV between two nodes: wire plan, segments, leases, staging and transports.

Knows of attention only the layout and the cache, and nothing of engines, requests, roles or grpc: token ranges and
block ids in, filled leases out. Importing it touches no device and starts no thread.
"""
