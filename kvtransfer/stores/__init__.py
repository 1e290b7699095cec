"""Stores of KV below the cache: host memory and, below it, files or a store of the whole cluster.

All of them keep entries in wire order, so a node of any layout and block size can read what another has written.
"""
